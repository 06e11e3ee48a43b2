"""Eviction policies of the tiers: which block goes next, and which may come in at all."""
