"""A plan in the making."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from pigou.engine.plan import Load, Plan, Revival, Started
from pigou.engine.sequence import Sequence
from pigou.request import Ints

Flags = NDArray[np.bool_]

_NO_PAIRS: Ints = np.empty((0, 2), dtype=np.int32)


class Foresight(msgspec.Struct):
    """Blocks laid out for the steps of a plan after its first; still in the free queue.

    Valid until the next plan is made.

    Attributes:
        needs: of each its row, step and block, (3, count and more): see below.
        count: how many there are.
    """

    needs: Ints
    count: int

    @property
    def rows(self) -> Ints:
        """Who needs them, in the order in which single steps would take them, (count,)."""
        return self.needs[0, : self.count]

    @property
    def steps(self) -> Ints:
        """At which step, 1 or more, ascending, (count,)."""
        return self.needs[1, : self.count]

    @property
    def blocks(self) -> Ints:
        """Which they are, in the order of the free queue, (count,)."""
        return self.needs[2, : self.count]


NO_FORESIGHT = Foresight(np.empty((3, 0), dtype=np.int32), 0)


class Batch:
    """A reused array in which the entries of a plan are gathered.

    Attributes:
        entries: rows and counts, shape (2, max_seqs); counts are 1 but for those that were added.
        size: how many entries there are.
    """

    def __init__(self, max_seqs: int) -> None:
        self.entries: Ints = np.ones((2, max_seqs), dtype=np.int32)
        self.size = self._alike = 0

    def decode(self, count: int) -> None:
        """Begin with `count` rows, written to `entries`, that compute one token each."""
        if self._alike < self.size:
            self.entries[1, self._alike : self.size] = 1
        self.size = self._alike = count

    def add(self, row: int, count: int) -> None:
        """Add a row that computes `count` tokens."""
        self.entries[0, self.size] = row
        self.entries[1, self.size] = count
        self.size += 1


class Given(msgspec.Struct):
    """What a row gives up in a plan.

    Attributes:
        entries: that it has before.
        first: index of the first entry that may go.
        blocks: those that hold the entries, shape (n,).
        freed: of these, how many come free.
    """

    entries: int
    first: int
    blocks: Ints
    freed: int = 0


class Draft(msgspec.Struct):
    """What one call of the scheduler has decided so far.

    Attributes:
        batch: the entries.
        budget: tokens that may still be computed.
        decodes: entries, the first ones, that decode.
        background: of those, tokens of prompts in the background (priority above 0).
        ranked: whether priorities count.
        leading: priority of the first prompt, which those of a higher one yield to; None before.
        steady: whether the next step would be the same, if nobody ended.
        started, preempted, loads: as in `Plan`.
        given: what rows give up.
        revivals: as in `Plan`.
        swap_out, copies, swap_in: pairs of blocks as in `Plan`, in pieces of shape (m, 2).
    """

    batch: Batch
    budget: int
    background: int
    ranked: bool
    started: list[Started]
    decodes: int = 0
    preempted: list[str] = msgspec.field(default_factory=list)
    loads: list[Load] = msgspec.field(default_factory=list)
    given: dict[int, Given] = msgspec.field(default_factory=dict)
    revivals: list[Revival] = msgspec.field(default_factory=list)
    swap_out: list[Ints] = msgspec.field(default_factory=list)
    copies: list[Ints] = msgspec.field(default_factory=list)
    swap_in: list[Ints] = msgspec.field(default_factory=list)
    leading: int | None = None
    steady: bool = True

    def room(self, seq: Sequence) -> int:
        """Return how many tokens of a prompt may still be computed."""
        if not self.ranked:
            return self.budget
        priority = seq.request.priority
        found = self.budget if priority <= 0 else min(self.budget, self.background)
        if self.leading is not None and priority > self.leading:
            found = 0
        self.steady &= found > 0 or self.budget == 0
        return found

    def compute(self, seq: Sequence, remaining: int) -> None:
        """Let a prompt compute as many of its remaining tokens as there is room for."""
        count = min(remaining, self.room(seq) if self.ranked else self.budget)
        self.batch.add(seq.row, count)
        self.budget -= count
        if self.ranked:
            self.leading = seq.request.priority
            self.background -= count if self.leading > 0 else 0

    @property
    def moves(self) -> bool:
        """Whether blocks are moved or loaded."""
        return bool(self.loads or self.copies or self.swap_in or self.swap_out)

    def plan(self, entries: Ints, samples: Flags, repeat: int, horizon: int) -> Plan:
        """Return the plan.

        Args:
            entries: rows, starts, counts and entries in the cache, (4, entries).
            samples: whether each entry yields a token, (entries,).
            repeat: most steps.
            horizon: as in `Plan`.
        """
        return Plan(
            entries[0],  # unpacking an array takes three times as long
            entries[1],
            entries[2],
            entries[3],
            samples,
            repeat,
            horizon,
            self.started,
            self.preempted,
            _joined(self.swap_out) if self.swap_out else _NO_PAIRS,
            _joined(self.copies) if self.copies else _NO_PAIRS,
            _joined(self.swap_in) if self.swap_in else _NO_PAIRS,
            self.loads,
        )


def pairs(source: Ints, target: Ints) -> Ints:
    """Return pairs (source, target), shape (n, 2)."""
    return np.stack((source, target), axis=1)


def _joined(pieces: list[Ints]) -> Ints:
    return np.concatenate(pieces)
