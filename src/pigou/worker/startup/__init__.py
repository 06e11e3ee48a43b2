"""Builds a worker, after a preflight check, and profiles it before it serves."""
