"""Capacity: a model's GPU memory, a fleet's cost, and the choice of a fleet."""
