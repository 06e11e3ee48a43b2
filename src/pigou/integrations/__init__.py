"""Bindings to other people's serving systems."""
