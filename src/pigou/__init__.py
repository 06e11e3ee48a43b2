"""Pigou: LLM serving on disaggregated fleets that puts a price on every externality."""

__version__ = "0.1.0"
