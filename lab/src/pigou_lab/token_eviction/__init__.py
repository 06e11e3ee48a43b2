"""Token eviction policies to compare with."""
