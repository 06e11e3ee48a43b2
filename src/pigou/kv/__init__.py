"""Blocks of KV memory: allocation, prefix cache and eviction. No torch."""
