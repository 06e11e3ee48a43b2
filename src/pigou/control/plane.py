"""ControlPlane: who runs where."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pigou.config import ControlConfig
from pigou.control.candidates import candidates
from pigou.control.index import PrefixIndex
from pigou.control.messages import (
    Action,
    CacheChanged,
    CacheLost,
    Choice,
    Decision,
    Ended,
    FirstToken,
    LoadReport,
    Observation,
    PrefillDone,
    Queue,
    Route,
    Shed,
    Tokens,
    WorkerDown,
    WorkerUp,
)
from pigou.control.queue import DrainRate, Waiting, WaitQueue
from pigou.control.routing.policy import RoutingPolicy, cheapest, load
from pigou.control.routing.view import FleetView
from pigou.control.state import State
from pigou.request import SECOND, Request

#: A worker that failed a request is tried again for it after this time, if no other can serve.
EXCLUDED_FOR = SECOND


class ControlPlane:
    """Admission, routing and the fleet's state; a state machine without a clock.

    A request is submitted, then routed at once, queued, or shed. A queued one is routed or shed
    by a later call. A routed one weighs on its workers until `Ended`, or until it is submitted
    again because its worker failed: then it goes before new requests, and is never shed for lack
    of space. All calls take `now` in nanoseconds, which must not fall.
    """

    def __init__(self, config: ControlConfig, policy: RoutingPolicy | None = None) -> None:
        """Start with no workers.

        Args:
            config: limits, and the name of the policy.
            policy: used instead of the named one.

        Raises:
            ConfigError: there is no policy of that name.
        """
        self.config = config
        self.policy = load(config.policy) if policy is None else policy
        self.state = State()
        self.index = PrefixIndex()
        self.queue = WaitQueue(config.max_queued)
        self._rate = DrainRate()
        self._generator = np.random.default_rng(config.seed)

    def submit(self, request: Request, now: int, exclude: frozenset[str] = frozenset()) -> Decision:
        """Decide what becomes of a request; `exclude` names workers that just failed it."""
        returned = self.state.end(request.id) or bool(exclude)
        self.queue.remove(request.id)
        choice = self._choose(request, exclude)
        if choice is not None:
            return Route(request.id, choice)
        if self.queue.full and not returned:
            retry = self._rate.retry_after(len(self.queue), now)
            return Shed(request.id, "the queue is full", retry)
        return Queue(request.id, self.queue.add(Waiting(request, now, exclude, returned)))

    def observe(self, observation: Observation, now: int) -> Sequence[Decision]:
        """Take in a fact; return the decisions that it sets free, for queued requests."""
        match observation:
            case Tokens(request, count):
                self.state.grew(request, count)
            case FirstToken(request) | PrefillDone(request):
                self.state.prefilled(request)
            case Ended(request):
                return self._ended(request, now)
            case WorkerUp(worker):
                self.state.up(worker)
                self._readmit(worker.id)
                return self._drain()
            case WorkerDown(worker):
                self.state.down(worker)
                self.index.drop(worker)
            case CacheChanged(worker, events):
                self.index.apply(worker, events)
            case CacheLost(worker):
                self.index.lost(worker)
            case LoadReport():
                self.state.report(observation)
        return ()

    def tick(self, now: int) -> Sequence[Action]:
        """Let time pass: queued requests time out, failed workers are tried again."""
        shed: list[Action] = []
        for waiting in self.queue:
            age = now - waiting.since
            if age >= self.config.queue_timeout:
                self.queue.remove(waiting.request.id)
                retry = self._rate.retry_after(len(self.queue), now)
                shed.append(Shed(waiting.request.id, "it waited too long for a worker", retry))
            elif age >= EXCLUDED_FOR:
                waiting.exclude = frozenset()
        return [*shed, *self._drain()]

    def _ended(self, request: str, now: int) -> Sequence[Route]:
        if self.queue.remove(request):
            return ()
        if not self.state.end(request):
            return ()
        self._rate.ended(now)
        return self._drain()

    def _readmit(self, worker: str) -> None:
        for waiting in self.queue:
            waiting.exclude -= {worker}

    def _drain(self) -> list[Route]:
        """Route queued requests, in order, as far as workers have room.

        Room does not depend on the request, so the first that finds none, and excludes nobody,
        ends the round; one that finds none because of whom it excludes lets others pass.
        """
        routes = []
        for waiting in self.queue:
            choice = self._choose(waiting.request, waiting.exclude)
            if choice is not None:
                self.queue.remove(waiting.request.id)
                routes.append(Route(waiting.request.id, choice))
            elif not waiting.exclude:
                break
        return routes

    def _choose(self, request: Request, exclude: frozenset[str]) -> Choice | None:
        """Choose workers and charge them; None when none can take the request."""
        found = candidates(request, self.state, exclude, self.config.max_inflight)
        if len(found) == 0:
            return None
        costs = self.policy.costs(request, self.view(request), found)
        pick = cheapest(costs, self._generator)
        if pick is None:
            return None
        workers = self.state.workers
        prefill = int(found.prefill[pick.index])
        choice = Choice(
            workers[found.decode[pick.index]].id,
            None if prefill < 0 else workers[prefill].id,
            pick.cost,
        )
        self.state.start(request, choice)
        return choice

    def view(self, request: Request) -> FleetView:
        """Return the fleet as policies see it when they route this request."""
        workers = self.state.workers
        overlap = np.zeros(len(workers), dtype=np.int64)
        if len(request.hashes):
            keys = request.hashes[:, 1]
            overlap[:] = [self.index.overlap(worker.id, keys) for worker in workers]
        return FleetView(
            ids=tuple(worker.id for worker in workers),
            overlap=overlap,
            block_size=np.array([worker.block_size for worker in workers], dtype=np.int64),
            blocks=np.array([worker.blocks for worker in workers], dtype=np.int64),
            **self.state.counts,  # type: ignore[arg-type]
            **self.state.reports,  # type: ignore[arg-type]
        )
