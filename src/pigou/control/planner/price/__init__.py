"""Pigou's planner: the value of a worker against the price of its GPU-seconds."""
