"""The prefix index: which worker holds which blocks, in which tier."""

from pigou.control.index.chain import chain
from pigou.control.index.keyed import KeyedEvent
from pigou.control.index.prefix import Cache, PrefixIndex
from pigou.control.index.table import Overlaps
from pigou.control.index.warm import warm_up

__all__ = ["Cache", "KeyedEvent", "Overlaps", "PrefixIndex", "chain", "warm_up"]
