"""Routing policies: Pigou's toll, simple ones, and those of other systems."""
