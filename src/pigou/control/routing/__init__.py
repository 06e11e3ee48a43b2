"""Routing policies, found by name: Pigou's toll, simple ones, and those of other systems."""
