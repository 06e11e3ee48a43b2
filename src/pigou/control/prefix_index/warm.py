"""Compile the kernels before the first event or request needs them."""

from __future__ import annotations

import numpy as np

from pigou.control.prefix_index.block_keys import chain
from pigou.control.prefix_index.index import PrefixIndex
from pigou.wire.kv_event_decoding import Cleared, Removed, Stored


def warm_up() -> None:
    """Run every kernel of the index once, so that it is compiled or loaded.

    Takes some seconds the first time on a machine, and a fraction of one after that.
    """
    index, tokens = PrefixIndex(max_blocks=4096, ttl=1), np.arange(512, dtype=np.uint32)
    keys = chain(tokens, 1)
    for size, worker in ((1, "a"), (2, "b")):
        names = np.arange(1, 1 + len(tokens) // size, dtype=np.uint64)
        index.apply(worker, [Stored(names, None, tokens, size), Removed(names[1:])])
        index.predict(worker, keys, 0)
    index.apply("a", [Stored((b"x",), 1, (2,), 1), Stored((7, 8), None, (0, 1), 1), Cleared()])
    many = np.arange(4096, dtype=np.uint32)
    for salt in ("s", "t"):
        names = many.astype(np.uint64) + np.uint64(10_000 * len(salt))
        index.apply("a", [Stored(names, None, many, 1, salt=salt)])
    index.overlaps(("a", "b"), keys)
    index.recomputed_share(("a", "b"))
    index.expire(2)
    index.drop("a")
