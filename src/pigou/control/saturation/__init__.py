"""Saturation: is the fleet out of capacity, and since when."""
