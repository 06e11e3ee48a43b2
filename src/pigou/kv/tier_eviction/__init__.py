"""Eviction and admission policies of the tiers."""
