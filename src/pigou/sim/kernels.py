"""Compiled loops over the rows of a worker's batch."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import bare_kernel, inlined
from pigou.request import Ints, Nanos

Flags = NDArray[np.bool_]
Counts = NDArray[np.int64]

#: Classes of gaps in an octave: a gap is known to 1 part in 2,048 at worst.
FINE = 1024
#: Classes in all: those of 1 nanosecond to 2^63.
CLASSES = 64 * FINE


@inlined
def _class_of(gap: int) -> int:
    """Return the class of a gap of 1 nanosecond and more; see `bounds`."""
    mantissa, exponent = math.frexp(float(gap))
    return (exponent - 1) * FINE + int((mantissa * 2.0 - 1.0) * FINE)


def bounds(classes: Counts) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the least gap of each class, and of the next one, in nanoseconds."""

    def least(each: Counts) -> NDArray[np.float64]:
        found: NDArray[np.float64] = np.ldexp(1.0 + (each % FINE) / FINE, each // FINE)
        return found

    return least(classes), least(classes + 1)


@bare_kernel
def add_gaps(gaps: Nanos, histogram: Counts, sums: Counts) -> None:
    """Count gaps in a histogram; `sums` has their number and their sum, shape (2,)."""
    for gap in gaps:
        histogram[_class_of(max(gap, 1))] += 1
        sums[0] += 1
        sums[1] += gap


@bare_kernel
def accumulate(times: Nanos, start: int) -> None:
    """Turn the times that steps take into those at which they end, the first begun at `start`."""
    end = start
    for i in range(times.shape[0]):
        end += times[i]
        times[i] = end


@bare_kernel
def count(
    rows: Ints,
    tokens: Ints,
    ends: Nanos,
    steps: int,
    produced: Counts,
    last: Nanos,
    streams: Flags,
    fresh: Flags,
    first: Ints,
    histogram: Counts,
    sums: Counts,
) -> int:
    """Count the tokens of a plan's entries, and the gaps before those of streams.

    Writes rows whose first token came to `first`; `steps` is 1 where there are any.

    Returns:
        How many.
    """
    begun = 0
    late = 0
    for i in range(rows.shape[0]):
        row = rows[i]
        produced[row] += tokens[i]
        if tokens[i] == 0 or not streams[row]:
            continue
        if fresh[row]:
            first[begun] = row
            begun += 1
        else:
            gap = ends[0] - last[row]
            histogram[_class_of(gap)] += 1
            sums[0] += 1
            sums[1] += gap
            late += 1
        last[row] = ends[steps - 1]
    if late:
        for step in range(1, steps):
            gap = ends[step] - ends[step - 1]
            histogram[_class_of(gap)] += late
            sums[0] += late
            sums[1] += gap * late
    return begun


@bare_kernel
def untold(
    rows: Ints,
    ends: Nanos,
    steps: int,
    now: int,
    mine: bool,
    produced: Counts,
    told: Counts,
    streams: Flags,
    seats: Counts,
    found: Counts,
    counts: Counts,
    size: int,
) -> int:
    """Find streams with tokens that nobody was told of; mark them as told.

    `rows` have yielded a token at each of the first `steps` of `ends` that is past, besides what
    `produced` says; one that is `now` is past if it is `mine`. Writes `seats` to `found`, and how
    many tokens to `counts`, from index `size` on, in the order of the rows.

    Returns:
        `size`, and how many there are.
    """
    passed, over = 0, steps
    while passed < over:
        middle = (passed + over) // 2
        if ends[middle] < now or (mine and ends[middle] == now):
            passed = middle + 1
        else:
            over = middle
    for row in rows:
        produced[row] += passed
    for row in range(streams.shape[0]):
        if streams[row] and produced[row] > told[row]:
            found[size] = seats[row]
            counts[size] = produced[row] - told[row]
            told[row] = produced[row]
            size += 1
    for row in rows:
        produced[row] -= passed
    return size
