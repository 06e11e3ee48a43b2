"""Measures step times of a live worker over HTTP, and fits a timing to them."""
