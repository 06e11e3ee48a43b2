"""Prefix index: which worker holds which blocks, in which tier."""

from pigou.control.prefix_index.block_keys import chain
from pigou.control.prefix_index.index import KeyedEvent, PrefixIndex, warm_up
from pigou.control.prefix_index.worker_cache import WorkerCacheStats

__all__ = ["KeyedEvent", "PrefixIndex", "WorkerCacheStats", "chain", "warm_up"]
