"""Tier eviction policies to compare with."""
