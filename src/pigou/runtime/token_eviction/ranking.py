"""Which entries go first, and what is lost with each block of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import kernel
from pigou.config import EvictionConfig
from pigou.request import Ints
from pigou.runtime.token_eviction.policy import PredictedReturns, Returns


@dataclass(frozen=True, slots=True)
class Ranking:
    """The entries of a row that would go first."""

    first: int  # slot from which on they were sought
    # of each head, those of the least return first, shape (layers * kv_heads, depth); or (1, depth)
    # for whole tokens.
    slots: Ints
    # lost with each further block of them, shape (depth // block size,).
    lost_returns: NDArray[np.float64]
    # of whole tokens, by slot, shape (n,); None where heads choose for themselves.
    returns: Returns | None

    def victims(self, first: int, drop: int) -> Ints | None:
        """Return each head's first `drop` victims from slot `first` on; None if they are too few.

        Shape as `slots`, with `drop` columns.
        """
        if first <= self.first:
            return (
                np.ascontiguousarray(self.slots[:, :drop]) if self.slots.shape[1] >= drop else None
            )
        heads = [head[head >= first][:drop] for head in self.slots]
        return np.stack(heads) if all(len(head) == drop for head in heads) else None


def rank(
    config: EvictionConfig,
    predicted: PredictedReturns,
    following: int,
    first: int,
    max_entries: int,
    size: int,
) -> Ranking:
    """Rank a row's entries.

    Sinks and recent tokens are none of them, nor what comes before `first`.

    Raises:
        ValueError: a return is not finite.
    """
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


Keys = NDArray[np.uint64]
Slots = NDArray[np.int64]

#: That keys are dealt into before they are sorted.
BUCKETS = 512
#: Keys of a bucket that are sorted by insertion.
FEW = 32


@kernel
def bucket_keys(keys: Keys, slots: Ints, out: Keys, order: Ints, stops: Slots) -> None:
    """Deal keys, and their slots, into buckets of equal width; those of a bucket keep their order.

    Args:
        keys: shape (n,), at least one.
        slots: shape (n,).
        out: takes the keys, bucket by bucket, shape (n,).
        order: takes their slots, shape (n,).
        stops: takes the end of each bucket in `out`, shape (`BUCKETS` + 1,); the last is no bucket.
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
    """Sort keys, and their slots with them; equal ones keep their order."""
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
    """Find each head's entries of least score, in ascending order, and what blocks of them cost.

    Equal scores are in the order of slots.

    Args:
        scores: shape (heads, n).
        positions: of the entries, shape (heads, n).
        victims: slots, written to, shape (heads, max_entries).
        lost_returns: sums of scores over all heads by `size` victims each, added to, shape
            (max_entries // size,).

    Returns:
        How many there are in each head, at most `max_entries`.
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
            # As integers, numbers are in their order once those below 0 are turned around.
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
