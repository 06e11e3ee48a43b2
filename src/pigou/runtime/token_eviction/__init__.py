"""Token eviction: what is known of cache entries, which of them go, and how the rest closes up."""
