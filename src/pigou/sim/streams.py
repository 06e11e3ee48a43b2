"""The streams of a simulated worker: the leg in each row, and when its tokens were generated."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import bare_kernel, inlined
from pigou.request import SECOND, Counts, Flags, Ints, Nanos
from pigou.sim.request_run import Leg

#: Classes of gaps in an octave: a gap is known to 1 part in 2,048 at worst.
FINE = 1024
#: Classes in all: those of 1 nanosecond to 2^63.
CLASSES = 64 * FINE
#: Entries of a histogram's sums.
GAPS, GAPS_NS = 0, 1


class Streams:
    """Counts the tokens of each row of the batch, and the gaps between those of streams."""

    def __init__(self, rows: int, itl: ITLHistogram) -> None:
        self.owner: list[Leg | None] = [None] * rows
        self._itl = itl
        self._last_token_ns: Nanos = np.zeros(rows, dtype=np.int64)
        self._produced: Counts = np.zeros(rows, dtype=np.int64)
        self._published: Counts = np.zeros(rows, dtype=np.int64)
        self._streams: Flags = np.zeros(rows, dtype=np.bool_)
        self._awaits_first: Flags = np.zeros(rows, dtype=np.bool_)
        self._first_rows: Ints = np.zeros(rows, dtype=np.int32)  # an output of the kernel
        self._slots: Counts = np.full(rows, -1, dtype=np.int64)  # slot of the attempt in each row
        self._awaiting = 0  # rows without a first token
        self.unpublished = False

    def occupy(self, leg: Leg, row: int) -> None:
        """Give a leg a row: its first, or another one after a preemption."""
        leg.row = row
        self.owner[row] = leg
        self._slots[row] = leg.attempt.slot
        self.unpublished = True
        self._produced[row], self._published[row] = leg.produced, leg.published
        self._last_token_ns[row] = leg.last_token_ns
        self._streams[row] = leg.streams
        self._set_awaiting(row, leg.streams and leg.first)

    def leave(self, leg: Leg) -> None:
        """Free a leg's row; write its counts to the leg."""
        row = leg.row
        leg.produced, leg.published = self._produced.item(row), self._published.item(row)
        leg.last_token_ns = self._last_token_ns.item(row)
        leg.row = -1
        self.owner[row] = None
        self.drop(row)

    def drop(self, row: int) -> None:
        """Stop counting a row as a stream: its client is gone."""
        self._streams[row] = False
        self._set_awaiting(row, False)

    def settle(self, leg: Leg, passed: int) -> None:
        """Write a leg's tokens so far, with `passed` steps of its plan."""
        row = leg.row
        leg.produced, leg.published = self._produced.item(row) + passed, self._published.item(row)

    def awaits_first(self, rows: Ints) -> bool:
        """True if one of these rows waits for its first token."""
        return self._awaiting > 0 and any(self._awaits_first[rows].tolist())

    def publish(
        self, rows: Ints, end_times: Nanos, steps: int, now: int, slots: Counts, counts: Counts,
        size: int,
    ) -> int:  # fmt: skip
        """Write slots and tokens of streams from index `size` on; return the new size.

        `rows` generate a token at each of `end_times` (ascending ns) up to now.
        """
        self.unpublished = False
        return publish(
            rows, end_times, steps, now, self._produced, self._published, self._streams,
            self._slots, slots, counts, size,
        )  # fmt: skip

    def count(self, rows: Ints, tokens: Ints, end_times: Nanos, steps: int) -> list[Leg]:
        """Count an ended plan's tokens and gaps; return legs with a first token."""
        self.unpublished = True
        itl, first_rows = self._itl, self._first_rows
        begun = count(
            rows, tokens, end_times, steps, self._produced, self._last_token_ns,
            self._streams, self._awaits_first, first_rows, itl.histogram, itl.sums,
        )  # fmt: skip
        if not begun:
            return []
        legs = []
        for row in first_rows[:begun].tolist():
            leg = self.owner[row]
            assert leg is not None
            self._awaits_first[row] = leg.first = False
            self._awaiting -= 1
            legs.append(leg)
        return legs

    def count_passed(self, rows: Ints, end_times: Nanos, steps: int) -> None:
        """Count the gaps of rows leaving a plan early."""
        itl, tokens = self._itl, np.full(len(rows), steps, dtype=np.int32)
        count(
            rows, tokens, end_times, steps, self._produced, self._last_token_ns,
            self._streams & ~self._awaits_first, self._awaits_first, self._first_rows,
            itl.histogram, itl.sums,
        )  # fmt: skip
        self._produced[rows] -= steps  # these are counted when the plan ends

    def _set_awaiting(self, row: int, awaiting: bool) -> None:
        self._awaiting += awaiting - bool(self._awaits_first[row])
        self._awaits_first[row] = awaiting


class ITLHistogram:
    """Histogram of gaps in nanoseconds, shape (CLASSES,), with an exact mean from `sums`."""

    def __init__(self) -> None:
        self.histogram: Counts = np.zeros(CLASSES, dtype=np.int64)
        self.sums: Counts = np.zeros(2, dtype=np.int64)

    @property
    def count(self) -> int:
        """Number of gaps."""
        return int(self.sums[GAPS])

    def mean(self) -> float:
        """Return the mean in seconds, or NaN."""
        return int(self.sums[GAPS_NS]) / self.count / SECOND if self.count else float("nan")

    def percentiles(self, shares: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return percentiles (0 to 100) in seconds, by class middles, or NaN."""
        if not self.count:
            return np.full(len(shares), np.nan)
        ranks = np.maximum(1, np.ceil(shares / 100 * self.count)).astype(np.int64)
        low, high = bounds(np.searchsorted(np.cumsum(self.histogram), ranks, side="left"))
        middle: NDArray[np.float64] = (low + high) / 2 / SECOND
        return middle


@inlined
def _class_of(gap: int) -> int:
    """Return the class of a gap of 1 nanosecond and more; see `bounds`."""
    mantissa, exponent = math.frexp(float(gap))
    return (exponent - 1) * FINE + int((mantissa * 2.0 - 1.0) * FINE)


def bounds(classes: Counts) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the smallest gap of each class, and of the next one, in nanoseconds."""

    def smallest(index: Counts) -> NDArray[np.float64]:
        gaps: NDArray[np.float64] = np.ldexp(1.0 + (index % FINE) / FINE, index // FINE)
        return gaps

    return smallest(classes), smallest(classes + 1)


@bare_kernel
def count(
    rows: Ints, tokens: Ints, end_times: Nanos, steps: int, produced: Counts, last_token_ns: Nanos,
    streams: Flags, awaits_first: Flags, first_rows: Ints, histogram: Counts, sums: Counts,
) -> int:  # fmt: skip
    """Count a plan's tokens, and gaps of streams; return how many `first_rows` were written."""
    begun = 0
    running = 0
    for i in range(rows.shape[0]):
        row = rows[i]
        produced[row] += tokens[i]
        if tokens[i] == 0 or not streams[row]:
            continue
        if awaits_first[row]:
            first_rows[begun] = row
            begun += 1
        else:
            many = max(tokens[i] - steps + 1, 1)  # tokens of the first step, drafts among them
            gap = max((end_times[0] - last_token_ns[row]) // many, 1)
            histogram[_class_of(gap)] += many
            sums[GAPS] += many
            sums[GAPS_NS] += gap * many
            running += 1
        last_token_ns[row] = end_times[steps - 1]
    if running:
        for step in range(1, steps):
            gap = end_times[step] - end_times[step - 1]
            histogram[_class_of(gap)] += running
            sums[GAPS] += running
            sums[GAPS_NS] += gap * running
    return begun


@bare_kernel
def publish(
    rows: Ints, end_times: Nanos, steps: int, now: int, produced: Counts, published: Counts,
    streams: Flags, row_slots: Counts, slots: Counts, counts: Counts, size: int,
) -> int:  # fmt: skip
    """Write unpublished tokens of streams and mark them published; return the new `size`.

    `rows` generated a token at each of the first `steps` `end_times` up to now, besides `produced`.
    """
    passed, end = 0, steps
    while passed < end:
        middle = (passed + end) // 2
        if end_times[middle] <= now:
            passed = middle + 1
        else:
            end = middle
    for row in rows:
        produced[row] += passed
    for row in range(streams.shape[0]):
        if streams[row] and produced[row] > published[row]:
            slots[size] = row_slots[row]
            counts[size] = produced[row] - published[row]
            published[row] = produced[row]
            size += 1
    for row in rows:
        produced[row] -= passed
    return size
