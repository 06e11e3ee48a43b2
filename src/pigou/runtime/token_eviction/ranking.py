"""Ranks a row's entries by return, and sums the returns lost per block evicted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import kernel
from pigou.config import EvictionConfig
from pigou.request import Ints
from pigou.runtime.token_eviction.policy import PredictedReturns, Returns

Keys = NDArray[np.uint64]
Slots = NDArray[np.int64]
#: Buckets per sort.
BUCKETS = 512
#: Max bucket size for insertion sort.
FEW = 32


@dataclass(frozen=True, slots=True)
class Ranking:
    """Candidates for eviction in a row, lowest return first."""

    first: int  # first slot ranked
    # by ascending return per head, (layers * kv_heads, depth), or (1, depth) for whole tokens.
    slots: Ints
    # per further block evicted, shape (depth // block size,).
    lost_returns: NDArray[np.float64]
    # whole tokens' returns by slot, shape (n,); None if heads evict independently.
    returns: Returns | None

    def victims(self, first: int, drop: int) -> Ints | None:
        """Return each head's first `drop` victims from slot `first` on; None if too few."""
        if first <= self.first:
            enough = self.slots.shape[1] >= drop
            return np.ascontiguousarray(self.slots[:, :drop]) if enough else None
        heads = [head[head >= first][:drop] for head in self.slots]
        return np.stack(heads) if all(len(head) == drop for head in heads) else None


def rank(
    config: EvictionConfig, predicted: PredictedReturns, following: int, first: int,
    max_entries: int, size: int,
) -> Ranking:  # fmt: skip
    """Rank a row's evictable entries from slot `first` on; raises ValueError if not finite."""
    scores, positions = predicted
    if not np.isfinite(scores).all():
        raise ValueError("the policy yields returns that are not finite")
    whole = scores.ndim == 1
    flat = np.ascontiguousarray(scores.reshape(1 if whole else -1, scores.shape[-1]))
    bits = flat.view(f"u{flat.itemsize}")
    rows = positions.reshape(-1, positions.shape[-1])
    victims = np.empty((len(flat), max_entries), dtype=np.int32)
    lost_returns = np.zeros(max_entries // size)
    stop = following - config.recent
    some = (first, config.sinks, stop, victims, lost_returns, size)
    depth = select_victims(flat, bits, rows, *some)
    lost_returns = lost_returns[: depth // size]
    return Ranking(first, victims[:, :depth], lost_returns, scores if whole else None)


@kernel
def bucket_keys(keys: Keys, slots: Ints, out: Keys, order: Ints, stops: Slots) -> None:
    """Distribute keys (n,) and their slots (n,) into equal-width buckets, stably.

    Writes `out` and `order` (n,), bucket by bucket, and the end of each bucket to `stops`
    (`BUCKETS` + 1,); the last entry is a sentinel.
    """
    low = high = keys[0]
    for key in keys:
        low, high = min(low, key), max(high, key)
    shift = np.uint64(0)
    while (high - low) >> shift >= np.uint64(BUCKETS):
        shift += np.uint64(1)
    stops[:] = 0
    for key in keys:
        stops[((key - low) >> shift) + np.uint64(1)] += 1
    for bucket in range(1, BUCKETS):
        stops[bucket] += stops[bucket - 1]
    for i in range(len(keys)):
        bucket = (keys[i] - low) >> shift
        out[stops[bucket]], order[stops[bucket]] = keys[i], slots[i]
        stops[bucket] += 1


@kernel
def sort_bucket(keys: Keys, slots: Ints) -> None:
    """Sort keys and their slots, stably."""
    if len(keys) > FEW:
        order = np.argsort(keys, kind="mergesort")
        slots[:] = slots[order]
        return
    for i in range(1, len(keys)):
        key, slot, j = keys[i], slots[i], i
        while j > 0 and keys[j - 1] > key:
            keys[j], slots[j] = keys[j - 1], slots[j - 1]
            j -= 1
        keys[j], slots[j] = key, slot


@kernel
def select_victims(
    scores: NDArray[np.floating], bits: NDArray[np.unsignedinteger], positions: Ints, first: int,
    sinks: int, stop: int, victims: Ints, lost_returns: NDArray[np.float64],
    size: int,
) -> int:  # fmt: skip
    """Select each head's entries of lowest score (heads, n), ascending; ties by slot.

    Writes `victims` (heads, max_entries) and adds the scores of each `size` victims, over all
    heads, to `lost_returns` (max_entries // size,). Returns the victims per head.
    """
    heads, count = scores.shape
    keys, slots = np.empty(count, np.uint64), np.empty(count, np.int32)
    dealt, order = np.empty(count, np.uint64), np.empty(count, np.int32)
    stops = np.empty(BUCKETS + 1, np.int64)
    sign = np.uint64(1) << np.uint64(8 * bits.itemsize - 1)
    depth = victims.shape[1]
    for head in range(heads):
        eligible = 0
        for slot in range(first, count):
            # Float bits order like the floats once negative ones are inverted.
            key = np.uint64(bits[head, slot])
            if key > sign:
                key = (sign << np.uint64(1)) - np.uint64(1) - key
            elif key < sign:
                key |= sign
            keys[eligible], slots[eligible] = key, slot
            eligible += sinks <= positions[head, slot] < stop
        depth = min(depth, eligible)
        if depth == 0:
            return 0
        bucket_keys(keys[:eligible], slots[:eligible], dealt, order, stops)
        start = bucket = 0
        while start < depth:
            sort_bucket(dealt[start : stops[bucket]], order[start : stops[bucket]])
            start = stops[bucket]
            bucket += 1
        victims[head, :depth] = order[:depth]
    for head in range(heads):
        for i in range(depth // size * size):
            lost_returns[i // size] += scores[head, victims[head, i]]
    return int(depth)
