"""A sequence on its way through the engine, and the queue of those that wait."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, auto
from heapq import heappop, heappush

import numpy as np

from pigou.compiled import bare_kernel_over
from pigou.config import QueueOrder
from pigou.kv.block_pool import HIGH, LOW
from pigou.request import BlockHashes, Ints, Request

#: An empty array of block ids.
NO_BLOCKS: Ints = np.empty(0, dtype=np.int32)


class SequenceState(Enum):
    """Where a sequence is."""

    WAITING = auto()
    LOADING = auto()
    RUNNING = auto()


class Sequence:
    """One request: what outlives a preemption. While it has a row, its lengths are in `Rows`.

    `length`, `computed`, `dropped` and `host_blocks` are valid while it waits.
    """

    __slots__ = (
        "cached_tokens", "computed", "copy_source", "dropped", "duplicates", "hashes",
        "host_blocks", "key", "length", "load", "preemptions", "remote_tokens", "request", "row",
        "state",
    )  # fmt: skip

    def __init__(self, request: Request, key: tuple[int, int, int], hashes: BlockHashes) -> None:
        self.request = request
        self.key = key  # its place in the queue: the lowest is admitted first, preempted last
        self.state = SequenceState.WAITING
        self.row = -1  # of the batch, -1 while it waits
        self.length = request.prompt  # tokens known, prompt and generated
        self.computed = 0  # tokens whose KV was swapped to the host
        self.dropped = 0  # of those, tokens whose entries were evicted
        self.host_blocks: Ints = NO_BLOCKS  # with that KV, in order
        self.hashes = hashes  # known ones of its full blocks, shape (known, 2), without gaps
        self.remote_tokens = request.remote  # that another worker still offers
        self.cached_tokens = -1  # of the prompt, not computed here at first; -1 before
        self.preemptions = 0  # how often it lost its row
        self.duplicates = False  # whether some block of its row has its hash cached elsewhere
        self.load = (0, 0)  # first block and number of blocks of the load under way
        self.copy_source = -1  # block that its last one is copied from by the plan under way

    def requeue(self) -> None:
        """Wait again after a preemption, without a row."""
        self.state = SequenceState.WAITING
        self.preemptions += 1
        self.duplicates = False

    def add_hashes(self, hashes: BlockHashes, full: int) -> None:
        """Append hashes of further blocks, shape (n, 2), as far as `full` blocks of it are full."""
        new = leading_hashes(hashes, full - len(self.hashes))
        if len(new):
            self.hashes = np.concatenate((self.hashes, new))


def leading_hashes(hashes: BlockHashes, limit: int) -> BlockHashes:
    """Return at most `limit` hashes, up to the first that is (0, 0).

    The result is contiguous and writable: kernels are compiled for such arrays alone.
    """
    if not (hashes.flags.c_contiguous and hashes.flags.writeable):
        hashes = hashes.copy()
    return hashes[: _gapless(hashes, min(max(limit, 0), len(hashes)))]


@bare_kernel_over("engine", "kv")
def _gapless(hashes: BlockHashes, limit: int) -> int:
    """Count the hashes of `hashes[:limit]` before the first that is (0, 0)."""
    for i in range(limit):
        if hashes[i, HIGH] == 0 and hashes[i, LOW] == 0:
            return i
    return limit


def order_key(request: Request, order: QueueOrder, number: int) -> tuple[int, int, int]:
    """Return a request's place in the queue: priority or deadline if so ordered, then arrival."""
    if order == "priority":
        return request.priority, request.arrival, number
    if order == "edf":
        return request.deadline, request.arrival, number
    return request.arrival, number, number


class WaitingQueue:
    """Waiting sequences by their keys, lowest first."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int, int], Sequence]] = []
        self._present: set[Sequence] = set()

    def __len__(self) -> int:
        return len(self._present)

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._present

    def push(self, seq: Sequence) -> None:
        """Add a sequence; keys are unique."""
        heappush(self._heap, (seq.key, seq))
        self._present.add(seq)

    def head(self) -> Sequence | None:
        """Return the next sequence, or None."""
        while self._heap:
            seq = self._heap[0][1]
            if seq in self._present:
                return seq
            heappop(self._heap)
        return None

    def pop(self) -> Sequence:
        """Remove and return the next sequence; there must be one."""
        seq = self.head()
        assert seq is not None, "nobody waits"
        heappop(self._heap)
        self._present.remove(seq)
        return seq

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence, wherever in the queue it is."""
        self._present.remove(seq)

    def __iter__(self) -> Iterator[Sequence]:
        """Yield the sequences in no particular order."""
        return iter(self._present)
