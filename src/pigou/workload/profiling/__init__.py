"""Measures what steps of a live worker take, over HTTP, and fits a timing to it."""
