"""The prefix index: which worker holds which blocks, in which tier."""

from pigou.control.prefix_index.block_keys import KeyedEvent, chain
from pigou.control.prefix_index.index import PrefixIndex, WorkerCacheStats
from pigou.control.prefix_index.table import Overlaps
from pigou.control.prefix_index.warm import warm_up

__all__ = ["KeyedEvent", "Overlaps", "PrefixIndex", "WorkerCacheStats", "chain", "warm_up"]
