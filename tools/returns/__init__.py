"""Predicting what a cache entry is worth: data, training, and policies compared by masks."""
