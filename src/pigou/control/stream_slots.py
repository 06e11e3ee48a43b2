"""Seats: output tokens of the routed requests as arrays, one place each."""

from __future__ import annotations

from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import bare_kernel

Counts = NDArray[np.int64]
Flags = NDArray[np.bool_]
Who = TypeVar("Who")

#: Stands for the row of a worker that is gone.
GONE = -1
_LEAST = 256


class Seats(Generic[Who]):
    """Who sits where, and how far each has come; arrays have one entry a seat.

    Attributes:
        row: of the worker that streams, `GONE` once it is.
        prompt: tokens of the prompt.
        tokens: prompt and what was generated so far.
        expected: tokens that there were expected to be in the end.
        flowing: whether the first token came.
        who: whose seat it is.
    """

    def __init__(self) -> None:
        """Start empty."""
        self.who: list[Who | None] = []
        self._free: list[int] = []
        self.row: Counts = np.zeros(0, dtype=np.int64)
        self.prompt, self.tokens, self.expected = (self.row.copy() for _ in range(3))
        self.flowing: Flags = np.zeros(0, dtype=np.bool_)

    def take(self, who: Who, row: int, prompt: int, expected: int) -> int:
        """Return a seat that is nobody else's."""
        if not self._free:
            self._more()
        seat = self._free.pop()
        self.who[seat] = who
        self.row[seat], self.prompt[seat], self.tokens[seat] = row, prompt, prompt
        self.expected[seat], self.flowing[seat] = expected, False
        return seat

    def leave(self, seat: int) -> None:
        """Give a seat back."""
        self.who[seat] = None
        self.row[seat] = GONE
        self._free.append(seat)

    def owner(self, seat: int) -> Who:
        """Return whose seat it is, which must be taken."""
        owner = self.who[seat]
        assert owner is not None, f"nobody has seat {seat}"
        return owner

    def down(self, row: int) -> None:
        """A worker is gone: those after it have a row less."""
        self.row[self.row == row] = GONE
        self.row[self.row > row] -= 1

    def grow(
        self, seats: Counts, counts: Counts, charged: Counts, beyond: Counts, flowed: Counts
    ) -> int:
        """Count tokens that came.

        Args:
            seats: of those that they are of, (n,); one may be there several times.
            counts: how many came, at least 1, (n,).
            charged: tokens of each worker's streams, (workers,); grows with them.
            beyond: those of them that were not expected, (workers,); likewise.
            flowed: those of them after the first of their streams, (workers,); likewise.

        Returns:
            By how much `beyond` grew.
        """
        return _grow(
            seats, counts, self.row, self.prompt, self.tokens, self.expected, self.flowing,
            charged, beyond, flowed,
        )  # fmt: skip

    def beyond(self, seat: int) -> int:
        """Return how many tokens came that were not expected."""
        return max(0, self.tokens.item(seat) - self.expected.item(seat))

    def _more(self) -> None:
        """Make room for twice as many."""
        old = len(self.who)
        new = max(_LEAST, old)
        none = np.zeros(new, dtype=np.int64)
        self.row = np.append(self.row, none + GONE)
        self.prompt = np.append(self.prompt, none)
        self.tokens = np.append(self.tokens, none)
        self.expected = np.append(self.expected, none)
        self.flowing = np.append(self.flowing, none > 0)
        self.who += [None] * new
        self._free += range(old + new - 1, old - 1, -1)


@bare_kernel
def _grow(
    seats: Counts, counts: Counts, row: Counts, prompt: Counts, tokens: Counts, expected: Counts,
    flowing: Flags, charged: Counts, beyond: Counts, flowed: Counts,
) -> int:  # fmt: skip
    """As `Seats.grow`."""
    grown = 0
    for i in range(seats.shape[0]):
        seat, count = seats[i], counts[i]
        before = tokens[seat]
        after = before + count
        tokens[seat] = after
        here = row[seat]
        if here < 0:
            continue
        charged[here] += count
        if flowing[seat]:
            flowed[here] += count if before > prompt[seat] else count - 1
        if after > expected[seat]:
            more = after - max(before, expected[seat])
            beyond[here] += more
            grown += more
    return grown
