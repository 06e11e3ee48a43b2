"""Latency of a pool by its load and size, and the workers that a load needs."""
