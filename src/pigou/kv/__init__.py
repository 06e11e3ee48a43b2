"""Blocks of KV memory: who holds them, which are cached, and which go first. No torch."""
