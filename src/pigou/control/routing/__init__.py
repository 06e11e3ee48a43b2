"""Routing policies: one formula a file, found by name."""
