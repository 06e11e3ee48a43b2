"""Blocks of KV memory: who holds them, what they cost. No torch, no clock, no I/O."""
