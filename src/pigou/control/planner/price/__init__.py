"""Pigou's planner: what a worker is worth against the price of its GPU-seconds."""
