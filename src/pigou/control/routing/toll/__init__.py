"""Pigou's own routing policy: what a choice costs its request, and what it costs all others."""
