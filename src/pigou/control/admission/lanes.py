"""Lanes of the queue: classes with a cap on their streams, and long prompts beside short ones.

| waits | for |
|---|---|
| a request of a class with `concurrency` | its class's streams, that many for each decode worker |
| a long prompt | a row and KV of a worker's lane (`pigou.engine.lanes`); one alone may exceed it |
| a short request | a row and KV that no waiting long prompt is owed |

Nobody waits behind a request of another lane, and no lane takes what another is owed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from pigou.config import LaneConfig, QueueClass
from pigou.control.admission.queue_order import QueuedRequest, QueueLane
from pigou.control.peers.allowance import TenantDemand, dithered, stream_allowance
from pigou.control.peers.bookings import ClassLoad
from pigou.control.state import FleetState
from pigou.request import SECOND, Counts, Flags, Request

#: Nanoseconds after which a lane starves whose first request waits while others are served.
STARVES_AFTER = 10 * SECOND
_NO_CLASS = QueueClass()


class _LaneStream(NamedTuple):
    lane: QueueLane
    worker: str
    sequences: int
    tokens: int


class LaneState(NamedTuple):
    """A lane with waiting requests."""

    lane: QueueLane
    waiting: int
    waited_s: float  # wait of the oldest, in seconds
    starves: bool  # it waited `STARVES_AFTER`, and other lanes were served meanwhile


class QueueLanes:
    """Streams of classes and of long prompts, and what each may still take."""

    def __init__(self, classes: Mapping[str, QueueClass]) -> None:
        self._classes = classes
        self._caps = {name: one.concurrency for name, one in classes.items() if one.concurrency}
        self.long_lane: LaneConfig | None = None  # lane of the workers for long prompts
        self._streams: dict[str, _LaneStream] = {}  # by request
        self._of_class: Counter[str] = Counter()
        self._starts: Counter[str] = Counter()  # streams that began, by class
        self.others: dict[str, tuple[ClassLoad, ...]] = {}  # by gateway
        self._long: Counter[str] = Counter()  # streams of long prompts by worker
        self._long_tokens: Counter[str] = Counter()
        self._served: dict[QueueLane, int] = {}  # when one was routed last

    @property
    def some(self) -> bool:
        """True if any request may wait apart from others."""
        return bool(self._caps) or self.long_lane is not None

    def of(self, request: Request) -> QueueLane:
        """Return a request's lane."""
        lane, workload = self.long_lane, request.workload
        if lane is None and not self._caps:
            return QueueLane()
        is_long = lane is not None and (
            lane.is_long(request.prompt) or self.class_of(request).lane == "long"
        )
        return QueueLane(workload if workload in self._caps else "", is_long)

    def class_of(self, request: Request) -> QueueClass:
        """Return a request's class, one without limits if it has none."""
        return self._classes.get(request.workload, _NO_CLASS)

    # --- streams ------------------------------------------------------------------------------

    def began(self, waiting: QueuedRequest, worker: str, now: int) -> None:
        """Record that a request was routed to decode on a worker."""
        request, lane = waiting.request, waiting.lane
        self._served[lane] = now
        if lane == QueueLane():
            return
        tokens = request.prompt + waiting.output * request.sequences
        self._streams[request.id] = _LaneStream(lane, worker, request.sequences, tokens)
        self._starts[lane.workload] += 1
        self._count(request.id, 1)

    def ended(self, request: str) -> None:
        """Record that a routed request left its worker."""
        if request in self._streams:
            self._count(request, -1)
            del self._streams[request]

    def _count(self, request: str, sign: int) -> None:
        lane, worker, sequences, tokens = self._streams[request]
        self._of_class[lane.workload] += sign * sequences
        if lane.is_long:
            self._long[worker] += sign * sequences
            self._long_tokens[worker] += sign * tokens
            if not self._long[worker]:
                del self._long[worker], self._long_tokens[worker]

    # --- who waits ----------------------------------------------------------------------------

    def loads(self, queued: Mapping[QueueLane, int]) -> tuple[ClassLoad, ...]:
        """Return streams and waiting requests of classes with caps; `queued` counts by lane."""
        waiting = Counter[str]()
        for lane, count in queued.items():
            waiting[lane.workload] += count
        return tuple(ClassLoad(name, self._of_class[name], waiting[name]) for name in self._caps)

    def at_cap(self, waiting: QueuedRequest, workers: int, queued: Mapping[QueueLane, int]) -> bool:
        """True if the request's class has its streams; one alone may be of any number."""
        name, sequences = waiting.lane.workload, waiting.request.sequences
        return name in self._caps and self._is_full(name, sequences, workers, queued)

    def full(self, queued: Mapping[QueueLane, int], workers: int) -> set[QueueLane]:
        """Return those lanes whose class has no stream left."""
        return {
            lane for lane in queued
            if lane.workload in self._caps and self._is_full(lane.workload, 1, workers, queued)
        }  # fmt: skip

    def _is_full(
        self, name: str, sequences: int, workers: int, queued: Mapping[QueueLane, int]
    ) -> bool:
        """True if this gateway's part of a class's streams has no room for more.

        Gateways divide a cap by demand; the fraction of a stream is served in its mean.
        """
        limit, running = float(self._caps[name] * max(1, workers)), self._of_class[name]
        if self.others:
            own = running + sum(n for lane, n in queued.items() if lane.workload == name)
            others = sum(
                load.streams + load.waiting
                for loads in self.others.values() for load in loads if load.name == name
            )  # fmt: skip
            share = stream_allowance(limit, [TenantDemand(own=own, all=own + others)])
            if share < limit:
                limit = dithered(share, self._starts[name])
        return running > 0 and running + sequences > limit

    def owed_tokens(self, head: QueuedRequest | None, limits: Counts, ids: Iterable[str]) -> Counts:
        """Return the tokens on each worker that a waiting long prompt keeps from short ones."""
        owed: Counts = np.zeros_like(limits)
        if head is not None and self.long_lane is not None:
            needed = head.request.prompt + head.output * head.request.sequences
            held = np.array([self._long_tokens[worker] for worker in ids], dtype=np.int64)
            reserved = (self.long_lane.kv_share * limits).astype(np.int64) - held
            owed = np.clip(reserved, 0, needed)
        return owed

    def rows(
        self, waiting: QueuedRequest, state: FleetState, max_streams: Counts, max_tokens: Counts,
        others: int,
    ) -> Flags:  # fmt: skip
        """Return which workers have a row for a request's lane, (workers,).

        `others` requests of the other lane wait; `max_tokens` is 0 where unknown.
        """
        lane, streams = self.long_lane, state.columns.decode_requests
        assert lane is not None, "rows are asked of a fleet without lanes"
        long = np.array([self._long[worker] for worker in state.ids], dtype=np.int64)
        if not waiting.lane.is_long:
            owed = np.maximum(0, lane.seqs - long) if others else 0
            short: Flags = (streams == 0) | (streams + owed < max_streams)
            return short
        held = np.array([self._long_tokens[worker] for worker in state.ids], dtype=np.int64)
        needed = held + waiting.request.prompt + waiting.output * waiting.request.sequences
        fits = (max_tokens == 0) | (needed <= lane.kv_share * max_tokens)
        idle = (streams == long) if not others else np.zeros(len(long), np.bool_)
        rows: Flags = (long == 0) | idle | ((long < lane.seqs) & fits)
        return rows

    def states(self, queue: Iterable[QueuedRequest], now: int) -> Iterator[LaneState]:
        """Yield the lanes of waiting requests, which are given oldest first."""
        heads: dict[QueueLane, int] = {}
        counts: Counter[QueueLane] = Counter()
        for waiting in queue:
            heads.setdefault(waiting.lane, waiting.since)
            counts[waiting.lane] += 1
        for lane, since in heads.items():
            # Served others since it came, and its own lane not within the time allowed.
            passed = any(at > since for other, at in self._served.items() if other != lane)
            own = max(since, self._served.get(lane, 0))
            starves = passed and now - own >= STARVES_AFTER
            yield LaneState(lane, counts[lane], (now - since) / SECOND, starves)
