"""Capacity: what a model needs of a GPU's memory, what a fleet costs, which fleet to take."""
