"""Puts a worker together, checks it first, and measures it before it serves."""
