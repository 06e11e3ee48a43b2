"""Routing policies: Pigou's toll, simple baselines, and those of other systems."""
