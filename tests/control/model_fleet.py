"""A fleet of ideal workers under a ControlPlane: prompts in turn, streams sharing a law."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pigou.control.journal import report_tokens
from pigou.control.messages import (
    Assess,
    Assessed,
    Ended,
    FirstToken,
    PrefillDone,
    Queue,
    Route,
    Shed,
    WorkerUp,
)
from pigou.control.plane import ControlPlane
from pigou.games.latency import LatencyLaw
from pigou.request import SECOND, FinishReason, Request, Role, Worker

TICK = SECOND // 10


@dataclass
class Stream:
    """A request that streams: tokens it has, and how many the plane was told of."""

    request: Request
    tokens: float = 0.0
    told: int = 0


@dataclass
class Ideal:
    """A worker: prompts first come first served; streams at 1 / law(streams) tokens a second.

    While it computes a prompt its streams stand still; its first takes `stall` ns longer.
    """

    law: LatencyLaw
    prefill_token: float = 1e-4
    prefill_base: float = 0.002
    queue: deque[tuple[Request, int]] = field(default_factory=deque)
    done_at: int | None = None
    streams: dict[str, Stream] = field(default_factory=dict)
    since: int = 0
    stall: int = 0


class ModelFleet:
    """Drives a plane over ideal workers; time is exact, tokens are told every 100 ms."""

    def __init__(self, plane: ControlPlane, workers: dict[Role, Sequence[Ideal]]) -> None:
        self.plane = plane
        self.now = SECOND
        self.workers: dict[str, Ideal] = {}
        self.routes: dict[str, Route] = {}
        self.requests: dict[str, Request] = {}
        self.ttft: dict[str, float] = {}
        self.seconds: dict[str, float] = {}
        self.shed: list[str] = []
        self.assessments: list[object] = []
        for role, some in workers.items():
            for number, ideal in enumerate(some):
                name = f"{role.value}-{number}"
                self.workers[name] = ideal
                plane.observe(WorkerUp(Worker(name, "u", role)), self.now)

    def run(self, requests: Sequence[Request], until: int | None = None) -> None:
        """Submit each request at its arrival, and go on until all have ended."""
        events = [(r.arrival, i, "arrive", r.id) for i, r in enumerate(requests)]
        heapq.heapify(events)
        self.requests |= {r.id: r for r in requests}
        tick = self.now + TICK
        while events or any(w.queue or w.streams for w in self.workers.values()):
            at = min(tick, self._next())
            if events and events[0][0] <= at:
                at = events[0][0]
            if until is not None and at > until:
                return
            self._advance(at)
            self._finish()
            if events and events[0][0] <= at:
                self._submit(self.requests[heapq.heappop(events)[3]])
            if at >= tick:
                tick = at + TICK
                self._tick()

    def _next(self) -> int:
        best = 2**62
        for worker in self.workers.values():
            if worker.done_at is not None:
                best = min(best, worker.done_at)
            elif worker.streams:
                left = min(s.request.max_tokens - s.tokens for s in worker.streams.values())
                pace = worker.law(float(len(worker.streams)))
                best = min(best, worker.since + max(1, int(left * pace * SECOND) + 1))
        return best

    def _advance(self, at: int) -> None:
        for worker in self.workers.values():
            if worker.done_at is None and worker.streams:
                pace = worker.law(float(len(worker.streams)))
                for stream in worker.streams.values():
                    gained = (at - worker.since) / SECOND / pace
                    stream.tokens = min(stream.request.max_tokens, stream.tokens + gained)
            worker.since = at
        self.now = at

    def _finish(self) -> None:
        for name, worker in self.workers.items():
            if worker.done_at is not None and self.now >= worker.done_at:
                request, _ = worker.queue.popleft()
                worker.done_at = None
                self._begin(worker)
                self._computed(request, name)
            for key, stream in list(worker.streams.items()):
                if stream.tokens >= stream.request.max_tokens - 1e-6:
                    self._end(worker, key, stream)

    def _computed(self, request: Request, name: str) -> None:
        choice = self.routes[request.id].choice
        if choice.prefill == name:
            self._take(self.plane.observe(PrefillDone(request.id), self.now))
        decode = self.workers[choice.decode]
        decode.streams[request.id] = Stream(request, 1.0)
        self.ttft[request.id] = (self.now - request.arrival) / SECOND
        self._take(self.plane.observe(FirstToken(request.id), self.now))

    def _end(self, worker: Ideal, key: str, stream: Stream) -> None:
        self._tell(key, stream)
        del worker.streams[key]
        self.seconds[key] = (self.now - stream.request.arrival) / SECOND
        self._take(self.plane.observe(Ended(key, FinishReason.STOP), self.now))

    def _tell(self, key: str, stream: Stream) -> None:
        fresh = round(stream.tokens) - stream.told
        if fresh > 0:
            stream.told += fresh
            report_tokens(self.plane, [(key, fresh)], self.now)

    def _submit(self, request: Request) -> None:
        decision = self.plane.submit(request, self.now)
        if not isinstance(decision, Queue):
            self._take([decision])

    def _take(self, decisions: Sequence[object]) -> None:
        for decision in decisions:
            if isinstance(decision, Route):
                self.routes[decision.request] = decision
                name = decision.choice.prefill or decision.choice.decode
                worker = self.workers[name]
                tokens = self.requests[decision.request].prompt - decision.choice.cached
                seconds = worker.prefill_base + worker.prefill_token * tokens
                worker.queue.append((self.requests[decision.request], int(seconds * SECOND)))
                self._begin(worker)
            elif isinstance(decision, Shed):
                self.shed.append(decision.request)
            elif isinstance(decision, Assess):
                found = self.plane.assess(decision.snapshot)
                self.assessments.append(found)
                self.plane.observe(Assessed(found), self.now)

    def _begin(self, worker: Ideal) -> None:
        if worker.done_at is None and worker.queue:
            worker.done_at = self.now + worker.queue[0][1] + worker.stall
            worker.stall = 0

    def _tick(self) -> None:
        for worker in self.workers.values():
            for key, stream in worker.streams.items():
                self._tell(key, stream)
        self._take(self.plane.tick(self.now))


def poisson(
    rate: float, seconds: float, seed: int, prompt: tuple[int, int], output: tuple[int, int]
) -> list[Request]:
    """Return requests that arrive at random, of lengths uniform in the given ranges."""
    rng = np.random.default_rng(seed)
    at, found = 1.0, []
    while True:
        at += rng.exponential(1 / rate)
        if at > seconds:
            return found
        found.append(
            Request(
                f"r{len(found)}",
                int(rng.integers(*prompt, endpoint=True)),
                int(rng.integers(*output, endpoint=True)),
                arrival=int(at * SECOND),
            )
        )
