"""A request on its way through the engine, and the rows of the batch as arrays."""

from __future__ import annotations

from enum import Enum, auto

import numpy as np

from pigou.config import EngineConfig, QueueOrder
from pigou.engine.kernels import (
    BLOCKS,
    COLUMNS,
    COMPACTED,
    COMPUTED,
    DROPPED,
    KNOWN,
    LENGTH,
    LIMIT,
    PRIORITY,
    SEALED,
)
from pigou.kv import kernels
from pigou.request import BlockHashes, Ints, Request

#: An empty array of block ids.
NO_BLOCKS: Ints = np.empty(0, dtype=np.int32)


class State(Enum):
    """Where a sequence is."""

    WAITING = auto()
    LOADING = auto()
    RUNNING = auto()


class Sequence:
    """One request: what outlives a preemption. While it has a row, its lengths are in `Rows`.

    Attributes:
        request: as it was added.
        key: its place in the queue; the lowest is admitted first and preempted last.
        state: where it is.
        row: its row of the batch, -1 while it waits.
        length: tokens known, prompt and generated; valid while it waits.
        computed: tokens whose KV was swapped to the host; valid while it waits.
        dropped: of those, tokens whose entries were given up; valid while it waits.
        host: host blocks with that KV, in order; empty when there is none.
        hashes: known hashes of its full blocks, shape (known, 2), without gaps.
        offer: tokens that another worker still offers.
        cached: tokens of the prompt that were not computed here at first; -1 before.
        preemptions: times that it lost its row.
        twins: whether some block of its row has its hash cached elsewhere.
        load: first block and number of blocks of the load under way.
        source: block that the row's last block is copied from by the plan under way, else -1.
    """

    __slots__ = (
        "cached",
        "computed",
        "dropped",
        "hashes",
        "host",
        "key",
        "length",
        "load",
        "offer",
        "preemptions",
        "request",
        "row",
        "source",
        "state",
        "twins",
    )

    def __init__(self, request: Request, key: tuple[int, int, int], hashes: BlockHashes) -> None:
        self.request = request
        self.key = key
        self.state = State.WAITING
        self.row = -1
        self.length = request.prompt
        self.computed = 0
        self.dropped = 0
        self.host: Ints = NO_BLOCKS
        self.hashes = hashes
        self.offer = request.remote
        self.cached = -1
        self.preemptions = 0
        self.twins = False
        self.load = (0, 0)
        self.source = -1

    def wait(self) -> None:
        """Go back to the queue after a preemption, without a row."""
        self.state = State.WAITING
        self.preemptions += 1
        self.twins = False

    def learn(self, hashes: BlockHashes, full: int) -> None:
        """Append hashes of further blocks, as far as blocks are full.

        Args:
            hashes: of the blocks after those known, shape (n, 2).
            full: full blocks of the sequence.
        """
        new = usable(hashes, full - len(self.hashes))
        if len(new):
            self.hashes = np.concatenate((self.hashes, new))


def usable(hashes: BlockHashes, limit: int) -> BlockHashes:
    """Cut `hashes` to `limit` rows, and before the first that is (0, 0).

    The result is contiguous and can be written to: kernels are compiled for such arrays alone.
    """
    if not (hashes.flags.c_contiguous and hashes.flags.writeable):
        hashes = hashes.copy()
    return hashes[: kernels.gapless(hashes, min(max(limit, 0), len(hashes)))]


def order_key(request: Request, order: QueueOrder, number: int) -> tuple[int, int, int]:
    """Return a request's place in the queue.

    Args:
        request: the request.
        order: `fcfs` (by arrival), `priority` (lower first, then arrival) or `edf` (earliest
            deadline first, then arrival).
        number: counts requests, and breaks ties.
    """
    if order == "priority":
        return request.priority, request.arrival, number
    if order == "edf":
        return request.deadline, request.arrival, number
    return request.arrival, number, number


class Rows:
    """The rows of the batch, one sequence each, as arrays of shape (max_seqs,).

    Attributes:
        tables: device block ids, shape (max_seqs, blocks of the longest sequence).
        columns: all that follow as one array, as kernels take them, shape (COLUMNS, max_seqs).
        computed: tokens whose KV is there, or was; the position of the next one.
        dropped: of those, tokens whose cache entries were given up (of each layer and head others);
            a multiple of the block size.
        compacted: tokens computed when entries were given up or computed again last; 0 where none
            ever were. Entries before lie in no order; nothing beyond `sealed` can be hit.
        length: tokens known; 0 for a row that nobody has. One more than `computed` in decode.
        limit: length at which the sequence ends.
        blocks: blocks that the row holds.
        known: blocks whose hash is known; 0 once compacted.
        sealed: blocks that were offered to the prefix cache.
        priority: of the request.
        owner: the sequence of each row, or None.
        used: rows that some sequence has.
    """

    def __init__(self, config: EngineConfig) -> None:
        count = config.max_seqs
        longest = -(-config.max_model_len // config.block_size)
        self.tables: Ints = np.zeros((count, longest), dtype=np.int32)
        self.columns: Ints = np.zeros((COLUMNS, count), dtype=np.int32)
        self.computed: Ints = self.columns[COMPUTED]
        self.length: Ints = self.columns[LENGTH]
        self.limit: Ints = self.columns[LIMIT]
        self.dropped: Ints = self.columns[DROPPED]
        self.blocks: Ints = self.columns[BLOCKS]
        self.known: Ints = self.columns[KNOWN]
        self.sealed: Ints = self.columns[SEALED]
        self.compacted: Ints = self.columns[COMPACTED]
        self.priority: Ints = self.columns[PRIORITY]
        self.owner: list[Sequence | None] = [None] * count
        self._free = list(range(count - 1, -1, -1))
        self.used = 0

    @property
    def free(self) -> int:
        """Rows that nobody has."""
        return len(self._free)

    def occupy(self, seq: Sequence, computed: int, blocks: int, sealed: int) -> int:
        """Give a sequence a row; returns which."""
        row = self._free.pop()
        self.used += 1
        self.owner[row] = seq
        self.computed[row] = computed
        self.length[row] = seq.length
        self.limit[row] = seq.request.prompt + seq.request.max_tokens
        self.blocks[row] = blocks
        self.dropped[row] = seq.dropped
        self.compacted[row] = seq.computed if seq.dropped else 0
        self.known[row] = 0 if seq.dropped else len(seq.hashes)
        self.sealed[row] = sealed
        self.priority[row] = seq.request.priority
        seq.row = row
        return row

    def vacate(self, seq: Sequence) -> None:
        """Take a sequence's row away, and keep its length with it."""
        row = seq.row
        seq.length = self.length.item(row)
        self.owner[row] = None
        self.length[row] = 0
        self.computed[row] = 0
        self.dropped[row] = 0
        self.compacted[row] = 0
        self.blocks[row] = 0
        self._free.append(row)
        self.used -= 1
        seq.row = -1
