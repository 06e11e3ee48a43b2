"""Latency of a pool by load and size, and the workers a load needs."""
