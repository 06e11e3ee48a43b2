"""Token eviction: side data of cache entries, scoring, eviction and compaction."""
