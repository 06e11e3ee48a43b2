"""A plan under construction, and the blocks reserved for its later steps."""

from __future__ import annotations

import msgspec
import numpy as np

from pigou.engine.block_table import (
    ENTRY_COUNT,
    ENTRY_ROW,
    NEED_BLOCK,
    NEED_ROW,
    NEED_STEP,
    PLAN_COUNTS,
    PLAN_KV_LENS,
    PLAN_ROWS,
    PLAN_STARTS,
    WORK_ROWS,
)
from pigou.engine.lanes import LongLane
from pigou.engine.plan import Load, Plan, Recomputation, Started
from pigou.request import Flags, Ints

_NO_PAIRS: Ints = np.empty((0, 2), dtype=np.int32)


class Lookahead(msgspec.Struct):
    """Blocks reserved for later steps of a plan; still in the free queue."""

    work: Ints  # has their rows, steps and ids (`EngineState.work`)
    count: int

    @property
    def rows(self) -> Ints:
        """Rows of the blocks, in the order of single steps, (count,)."""
        return self.work[NEED_ROW, : self.count]

    @property
    def steps(self) -> Ints:
        """Steps that need the blocks, 1 or more, ascending, (count,)."""
        return self.work[NEED_STEP, : self.count]

    @property
    def blocks(self) -> Ints:
        """Block ids, in the order of the free queue, (count,)."""
        return self.work[NEED_BLOCK, : self.count]


NO_LOOKAHEAD = Lookahead(np.empty((WORK_ROWS, 0), dtype=np.int32), 0)


class EntryBuffer:
    """Entries of a plan, gathered in `EngineState.work`; counts beyond `size` are 1."""

    def __init__(self, work: Ints) -> None:
        self._rows, self._counts = work[ENTRY_ROW], work[ENTRY_COUNT]
        self._counts[:] = 1
        self.size = self._decodes = 0

    def decode(self, count: int) -> None:
        """Start with `count` decoding rows already written to `work`."""
        if self._decodes < self.size:
            self._counts[self._decodes : self.size] = 1
        self.size = self._decodes = count

    def add(self, row: int, count: int) -> None:
        """Add a row that computes `count` tokens."""
        self._rows[self.size] = row
        self._counts[self.size] = count
        self.size += 1


class RowEviction(msgspec.Struct):
    """Entries that a row evicts in a plan."""

    entries: int
    first: int  # index of the first entry that may go
    blocks: Ints  # those that hold the entries, shape (n,)
    freed: int = 0


class ScheduleBuilder(msgspec.Struct):
    """Decisions of the current scheduler call; names as in `Plan`."""

    batch: EntryBuffer
    budget: int  # remaining tokens
    background: int  # remaining tokens for background prompts (priority above 0)
    ranked: bool  # True if priorities count
    started: list[Started]
    lane: LongLane | None = None
    long_tokens: int = 0  # remaining tokens for long prompts, where there is a lane
    decodes: int = 0  # leading entries that decode
    preempted: list[str] = []
    loads: list[Load] = []
    evictions: dict[int, RowEviction] = {}  # by row
    recomputations: list[Recomputation] = []
    swap_out: list[Ints] = []
    copies: list[Ints] = []
    swap_in: list[Ints] = []
    top_priority: int | None = None  # the first prompt's; higher numbers yield to it
    steady: bool = True  # True if the next step is the same unless a sequence ends

    @property
    def moves(self) -> bool:
        """True if blocks are moved or loaded."""
        return bool(self.loads or self.copies or self.swap_in or self.swap_out)

    def build(self, entries: Ints, samples: Flags, repeat: int, horizon: int) -> Plan:
        """Build the plan from rows, starts, counts and cached entries, shape (4, entries)."""
        # Unpacking an array takes three times as long.
        return Plan(
            entries[PLAN_ROWS], entries[PLAN_STARTS], entries[PLAN_COUNTS], entries[PLAN_KV_LENS],
            samples, repeat, horizon, self.started, self.preempted, _concatenated(self.swap_out),
            _concatenated(self.copies), _concatenated(self.swap_in), self.loads,
        )  # fmt: skip


def _concatenated(parts: list[Ints]) -> Ints:
    return np.concatenate(parts) if parts else _NO_PAIRS


def pairs(source: Ints, target: Ints) -> Ints:
    """Return pairs (source, target), shape (n, 2)."""
    return np.stack((source, target), axis=1)
