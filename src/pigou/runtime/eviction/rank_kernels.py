"""Compiled kernel that finds the entries of least score."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import kernel
from pigou.request import Ints

Keys = NDArray[np.uint64]
Slots = NDArray[np.int64]

#: That keys are dealt into before they are sorted.
BUCKETS = 512
#: Keys of a bucket that are sorted by insertion.
FEW = 32


@kernel
def deal(keys: Keys, slots: Ints, out: Keys, order: Ints, ends: Slots) -> None:
    """Deal keys, and their slots, into buckets of equal width; those of a bucket keep their order.

    Args:
        keys: shape (n,), at least one.
        slots: shape (n,).
        out: takes the keys, bucket by bucket, shape (n,).
        order: takes their slots, shape (n,).
        ends: takes the end of each bucket in `out`, shape (`BUCKETS` + 1,); the last is no bucket.
    """
    least = greatest = keys[0]
    for key in keys:
        least, greatest = min(least, key), max(greatest, key)
    shift = np.uint64(0)
    while (greatest - least) >> shift >= np.uint64(BUCKETS):
        shift += np.uint64(1)
    ends[:] = 0
    for key in keys:
        ends[((key - least) >> shift) + np.uint64(1)] += 1
    for bucket in range(1, BUCKETS):
        ends[bucket] += ends[bucket - 1]
    for i in range(len(keys)):
        bucket = (keys[i] - least) >> shift
        out[ends[bucket]], order[ends[bucket]] = keys[i], slots[i]
        ends[bucket] += 1


@kernel
def arrange(keys: Keys, slots: Ints) -> None:
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
def rank(
    scores: NDArray[np.floating], bits: NDArray[np.unsignedinteger], positions: Ints, first: int,
    sinks: int, stop: int, victims: Ints, losses: NDArray[np.float64], size: int,
) -> int:  # fmt: skip
    """Find each head's entries of least score, in ascending order, and what blocks of them cost.

    Equal scores are in the order of slots.

    Args:
        scores: shape (heads, n).
        bits: the same memory as unsigned integers.
        positions: of the entries, shape (heads, n).
        first: slot from which on entries may go.
        sinks: position from which on they may.
        stop: position before which they may.
        victims: slots, written to, shape (heads, most).
        losses: sums of scores over all heads by `size` victims each, added to, shape
            (most // size,).
        size: tokens in a block.

    Returns:
        How many were found in each head, at most `most`.
    """
    heads, count = scores.shape
    keys, slots = np.empty(count, np.uint64), np.empty(count, np.int32)
    dealt, order = np.empty(count, np.uint64), np.empty(count, np.int32)
    ends = np.empty(BUCKETS + 1, np.int64)
    sign = np.uint64(1) << np.uint64(8 * bits.itemsize - 1)
    depth = victims.shape[1]
    for head in range(heads):
        found = 0
        for slot in range(first, count):
            # As integers, numbers are in their order once those below 0 are turned around.
            key = np.uint64(bits[head, slot])
            if key > sign:
                key = (sign << np.uint64(1)) - np.uint64(1) - key
            elif key < sign:
                key |= sign
            keys[found], slots[found] = key, slot
            found += sinks <= positions[head, slot] < stop
        depth = min(depth, found)
        if depth == 0:
            return 0
        deal(keys[:found], slots[:found], dealt, order, ends)
        start = bucket = 0
        while start < depth:
            arrange(dealt[start : ends[bucket]], order[start : ends[bucket]])
            start = ends[bucket]
            bucket += 1
        victims[head, :depth] = order[:depth]
    for head in range(heads):
        for i in range(depth // size * size):
            losses[i // size] += scores[head, victims[head, i]]
    return int(depth)
