"""The streams of a simulated worker: who has which row, and which tokens came when."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import bare_kernel, inlined
from pigou.request import SECOND, Ints, Nanos
from pigou.sim.leg import Leg


class Streams:
    """Counts the tokens of each row of the batch, and the gaps between those of streams.

    Attributes:
        owner: the leg of each row, or None.
        untold: whether a step ended, or somebody came, since tokens were told.
    """

    def __init__(self, rows: int, gaps: Gaps) -> None:
        """Start with nobody.

        Args:
            rows: of the batch.
            gaps: takes in those between the tokens of streams.
        """
        self.owner: list[Leg | None] = [None] * rows
        self._gaps = gaps
        self._last: Nanos = np.zeros(rows, dtype=np.int64)
        self._produced: Counts = np.zeros(rows, dtype=np.int64)
        self._told: Counts = np.zeros(rows, dtype=np.int64)
        self._streams: Flags = np.zeros(rows, dtype=np.bool_)
        self._fresh: Flags = np.zeros(rows, dtype=np.bool_)
        self._rows: Ints = np.zeros(rows, dtype=np.int32)
        self._seats: Counts = np.full(rows, -1, dtype=np.int64)  # of the trips in the rows
        self._anew = 0  # rows whose first token is still to come
        self.untold = False

    def occupy(self, leg: Leg, row: int) -> None:
        """Give a leg a row: its first, or another one after a preemption."""
        leg.row = row
        self.owner[row] = leg
        self._seats[row] = leg.trip.seat
        self.untold = True
        self._produced[row], self._told[row], self._last[row] = leg.produced, leg.told, leg.last
        self._streams[row] = leg.streams
        self._renew(row, leg.streams and leg.first)

    def leave(self, leg: Leg) -> None:
        """Take a leg's row, and keep its figures."""
        row = leg.row
        leg.produced, leg.told = self._produced.item(row), self._told.item(row)
        leg.last = self._last.item(row)
        leg.row = -1
        self.owner[row] = None
        self.drop(row)

    def drop(self, row: int) -> None:
        """Nobody wants the tokens of a row any more."""
        self._streams[row] = False
        self._renew(row, False)

    def settle(self, leg: Leg, passed: int) -> None:
        """Write to a leg what it has yielded, `passed` steps of its plan counted, and was told."""
        row = leg.row
        leg.produced, leg.told = self._produced.item(row) + passed, self._told.item(row)

    def begins(self, rows: Ints) -> bool:
        """Whether the first token of one of these rows is still to come."""
        return self._anew > 0 and any(self._fresh[rows].tolist())

    def told(
        self, rows: Ints, ends: Nanos, steps: int, now: int, mine: bool, seats: Counts,
        counts: Counts, size: int,
    ) -> int:  # fmt: skip
        """Tell the tokens that nobody was told of, by the seats of their streams.

        Args:
            rows: have yielded one token besides at each of `ends` that is past.
            ends: ascending, (steps,) or more.
            steps: of those that count.
            now: nanoseconds; an end at this time is past if it is `mine`.
            mine: see `now`.
            seats, counts: take who, and how many, from index `size` on.
            size: see there.

        Returns:
            `size`, and how many streams there are.
        """
        self.untold = False
        return untold(
            rows, ends, steps, now, mine, self._produced, self._told, self._streams, self._seats,
            seats, counts, size,
        )  # fmt: skip

    def count(self, rows: Ints, tokens: Ints, ends: Nanos, steps: int) -> list[Leg]:
        """Count the tokens of a plan that ended, and their gaps; return whose first ones came."""
        self.untold = True
        gaps, first = self._gaps, self._rows
        begun = count(
            rows, tokens, ends, steps, self._produced, self._last,
            self._streams, self._fresh, first, gaps.histogram, gaps.sums,
        )  # fmt: skip
        if not begun:
            return []
        found = []
        for row in first[:begun].tolist():
            leg = self.owner[row]
            assert leg is not None
            self._fresh[row] = leg.first = False
            self._anew -= 1
            found.append(leg)
        return found

    def count_passed(self, rows: Ints, ends: Nanos, steps: int) -> None:
        """Count the gaps of rows whose plan will not be counted for them to its end."""
        gaps, tokens = self._gaps, np.full(len(rows), steps, dtype=np.int32)
        count(
            rows, tokens, ends, steps, self._produced, self._last,
            self._streams & ~self._fresh, self._fresh, self._rows, gaps.histogram, gaps.sums,
        )  # fmt: skip
        self._produced[rows] -= steps  # these are counted when the plan ends

    def _renew(self, row: int, fresh: bool) -> None:
        """Note whether a row's first token is still to come."""
        self._anew += fresh - bool(self._fresh[row])
        self._fresh[row] = fresh


class Gaps:
    """A histogram of nanoseconds, with an exact mean.

    Attributes:
        histogram: gaps by class, shape (CLASSES,).
        sums: how many there are, and their sum in nanoseconds, shape (2,).
    """

    def __init__(self) -> None:
        self.histogram: Counts = np.zeros(CLASSES, dtype=np.int64)
        self.sums: Counts = np.zeros(2, dtype=np.int64)

    @property
    def count(self) -> int:
        """How many there are."""
        return int(self.sums[0])

    def add(self, gaps: Nanos) -> None:
        """Count gaps of 0 nanoseconds and more, shape (n,)."""
        add_gaps(gaps, self.histogram, self.sums)

    def mean(self) -> float:
        """Return the mean in seconds, NaN where there is none."""
        return int(self.sums[1]) / self.count / SECOND if self.count else float("nan")

    def percentiles(self, shares: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return percentiles (0 to 100) in seconds, each the middle of its class; NaN where empty.

        The k-th smallest of n, k = ceil(share n / 100).
        """
        if not self.count:
            return np.full(len(shares), np.nan)
        ranks = np.maximum(1, np.ceil(shares / 100 * self.count)).astype(np.int64)
        low, high = bounds(np.searchsorted(np.cumsum(self.histogram), ranks, side="left"))
        middle: NDArray[np.float64] = (low + high) / 2 / SECOND
        return middle


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
