"""Placement: which nodes the workers of a gang run on, by what their KV transfers cost."""
