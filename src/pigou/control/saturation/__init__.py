"""Saturation: is the fleet short of room, and since when."""
