"""The streams of a simulated worker: who has which row, and which tokens came when."""

from __future__ import annotations

import numpy as np

from pigou.request import Ints, Nanos
from pigou.sim.gaps import Gaps
from pigou.sim.kernels import Counts, Flags, count, untold
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
