"""A sequence in the engine, and the queue of waiting sequences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from enum import Enum, auto
from heapq import heappop, heappush

import numpy as np

from pigou.compiled import bare_kernel_over
from pigou.config import EngineConfig
from pigou.kv.block_pool import HIGH, LOW
from pigou.request import NEVER, SECOND, BlockHashes, Ints, Request

#: An empty array of block ids.
NO_BLOCKS: Ints = np.empty(0, dtype=np.int32)


class SequenceState(Enum):
    """State of a sequence."""

    WAITING = auto()
    LOADING = auto()
    RUNNING = auto()


class Sequence:
    """State of a request that survives preemption; lengths of running ones are in `Rows`."""

    __slots__ = (
        "cached_tokens", "computed", "copy_source", "dropped", "duplicates", "hashes",
        "host_blocks", "key", "length", "load", "preemptions", "remote_tokens", "request", "row",
        "state", "was_owed",
    )  # fmt: skip

    def __init__(self, request: Request, key: tuple[int, int, int], hashes: BlockHashes) -> None:
        self.request = request
        self.key = key  # sort key in the queue: the lowest is admitted first, preempted last
        self.state = SequenceState.WAITING
        self.row = -1  # -1 while it waits
        self.length = request.prompt  # prompt and generated tokens
        self.computed = 0  # tokens with KV on the host
        self.dropped = 0  # computed tokens with evicted entries
        self.host_blocks: Ints = NO_BLOCKS  # swapped-out blocks, in order
        self.hashes = hashes  # known hashes of full blocks, shape (known, 2), without gaps
        self.remote_tokens = request.remote  # offered by another worker
        self.cached_tokens = -1  # prompt tokens cached at first admission; -1 before
        self.preemptions = 0
        self.duplicates = False  # True if a hash of its row is cached under another block
        self.load = (0, 0)  # first block and number of blocks of the load under way
        self.was_owed = False  # True once others were preempted for it
        self.copy_source = -1  # block that the current plan copies to its last one

    def requeue(self) -> None:
        """Return to the waiting state after a preemption."""
        self.state = SequenceState.WAITING
        self.preemptions += 1
        self.duplicates = False

    def add_hashes(self, hashes: BlockHashes, full: int) -> None:
        """Append hashes of further blocks, shape (n, 2), up to `full` blocks in all."""
        new = leading_hashes(hashes, full - len(self.hashes))
        if len(new):
            self.hashes = np.concatenate((self.hashes, new))


def leading_hashes(hashes: BlockHashes, limit: int) -> BlockHashes:
    """Return a contiguous copy of at most `limit` hashes, up to the first (0, 0)."""
    if not (hashes.flags.c_contiguous and hashes.flags.writeable):
        hashes = hashes.copy()
    return hashes[: _gapless(hashes, min(max(limit, 0), len(hashes)))]


@bare_kernel_over("engine", "kv")
def _gapless(hashes: BlockHashes, limit: int) -> int:
    for i in range(limit):
        if hashes[i, HIGH] == 0 and hashes[i, LOW] == 0:
            return i
    return limit


def order_key(
    request: Request, config: EngineConfig, number: int, generated: int = 0, computed: int = 0
) -> tuple[int, int, int]:
    """Return a request's sort key: priority, deadline or tokens to go if so ordered, then arrival.

    Tokens to go are predicted ones, never `max_tokens`, and weighted ones of `prompt + generated`
    that are to be computed, all but `computed`; ageing as in
    `pigou.control.admission.queue_order.ShortestRemaining`.
    """
    order = config.order
    if order == "shortest":
        uncached = max(1, request.prompt + generated - computed)
        left = max(1, request.expected - generated) + config.input_weight * uncached
        key = round(left * SECOND) + round(config.ageing * request.arrival)
        return key, request.arrival, number
    if order == "priority":
        return request.priority, request.arrival, number
    if order == "edf":
        return request.deadline, request.arrival, number
    return request.arrival, number, number


class WaitingQueue:
    """Waiting sequences by key, lowest first; prompts from `long_from` tokens on in lane 1."""

    def __init__(self, long_from: int = NEVER) -> None:
        self._long_from = long_from
        self._by_tenant = False
        #: By lane and, with quotas, tenant.
        self._heaps: dict[tuple[bool, str], list[tuple[tuple[int, int, int], Sequence]]] = {}
        self._present: set[Sequence] = set()
        self._parked: dict[str, list[Sequence]] = {}  # by adapter that is not loaded
        self.adapters: Counter[str] = Counter()  # sequences by adapter
        self.version = 0  # changes with the sequences that may be next

    def __len__(self) -> int:
        return len(self._present)

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._present

    def push(self, seq: Sequence) -> None:
        """Add a sequence; keys are unique."""
        heappush(self._heap(seq), (seq.key, seq))
        self._present.add(seq)
        self.version += 1
        self.adapters[seq.request.model] += 1

    def park(self, seq: Sequence) -> None:
        """Pass over a lane's next sequence until its adapter is loaded."""
        heappop(self._heap(seq))
        self.version += 1
        self._parked.setdefault(seq.request.model, []).append(seq)

    def unpark(self, adapter: str) -> None:
        """Put an adapter's sequences back in order."""
        self.version += 1
        for seq in self._parked.pop(adapter, ()):
            heappush(self._heap(seq), (seq.key, seq))

    def head(self, skip: int = -1) -> Sequence | None:
        """Return the next sequence, not of lane `skip`, or None."""
        first: Sequence | None = None
        for (lane, _), heap in self._heaps.items():
            while heap and heap[0][1] not in self._present:
                heappop(heap)
            if heap and lane != skip and (first is None or heap[0][0] < first.key):
                first = heap[0][1]
        return first

    def heads(self) -> list[Sequence]:
        """Return the next sequence of each lane and tenant."""
        heads = []
        for heap in self._heaps.values():
            while heap and heap[0][1] not in self._present:
                heappop(heap)
            if heap:
                heads.append(heap[0][1])
        if len(heads) < len(self._heaps):
            self._heaps = {key: heap for key, heap in self._heaps.items() if heap}
        return heads

    def split(self) -> None:
        """Keep the sequences of each tenant apart."""
        waiting = [entry for heap in self._heaps.values() for entry in heap]
        self._by_tenant, self._heaps = True, {}
        for entry in waiting:
            heappush(self._heap(entry[1]), entry)

    def is_long(self, seq: Sequence) -> bool:
        """True for a sequence of lane 1."""
        return seq.request.prompt >= self._long_from

    def pop(self, seq: Sequence) -> None:
        """Remove a lane's next sequence."""
        popped = heappop(self._heap(seq))[1]
        assert popped is seq, "another sequence goes before"
        self.remove(seq)

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence from anywhere in the queue."""
        self._present.remove(seq)
        self.version += 1
        self.adapters[seq.request.model] -= 1

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._present)

    def _heap(self, seq: Sequence) -> list[tuple[tuple[int, int, int], Sequence]]:
        key = self.is_long(seq), seq.request.tenant if self._by_tenant else ""
        heap = self._heaps.get(key)
        if heap is None:
            heap = self._heaps[key] = []
        return heap
