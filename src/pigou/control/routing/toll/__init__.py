"""Pigou's routing policy: cost of a choice for its request and for all others."""
