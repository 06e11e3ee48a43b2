"""Prefill workers that pull: drives a prefill queue by the virtual clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from pigou.control.messages import Observation, PrefillClaimed, WorkerDown, WorkerDraining, WorkerUp
from pigou.control.plane import ControlPlane
from pigou.control.pull_queue.claim_price import ServiceTable, cached_at, service_table
from pigou.control.pull_queue.config import PullQueueConfig
from pigou.control.pull_queue.prefill_queue import (
    PrefillClaim,
    PrefillItem,
    PrefillQueue,
    QueueEffect,
)
from pigou.lifecycle.messages import LifecycleEvent, PrefillStays, RequestRefused, StartPrefill
from pigou.request import NEVER, Request
from pigou.sim.request_run import Attempt, Leg
from pigou.sim.virtual_clock import Clock, Phase
from pigou.sim.worker_spec import FleetWorker

#: Key of the queue's events, among those of the fleet's ticks.
_KEY = -4


class PullDriver(Protocol):
    """Dispatcher calls of the queue."""

    def observe(self, observation: Observation, now: int) -> None:
        """Tell the control plane a fact."""

    def take(self, attempt: Attempt, event: LifecycleEvent, now: int) -> None:
        """Give the lifecycle of an attempt an event."""

    def send_prefill(self, attempt: Attempt, worker: str, number: int, now: int) -> None:
        """Start prefill, as a numbered leg of a lifecycle."""

    def catch_up(self) -> None:
        """Have all past KV events published."""


class PrefillPull:
    """The prefill queue of a simulated fleet, and its pulling workers, longest idle first.

    The router's prefill worker is a forecast: an unclaimed prompt weighs there.
    """

    def __init__(
        self, config: PullQueueConfig, plane: ControlPlane, clock: Clock,
        workers: Mapping[str, FleetWorker], driver: PullDriver,
    ) -> None:  # fmt: skip
        self.queue = PrefillQueue(config)
        self.batches: list[int] = []
        self._plane, self._clock, self._driver = plane, clock, driver
        self._workers = workers
        self._attempts: dict[str, tuple[Attempt, int]] = {}  # with the number of their leg
        self._idle_since: dict[str, int] = {}
        self._next_ns = NEVER

    def observe(self, observation: Observation, now: int) -> None:
        """Note joins, leaves and role changes."""
        if isinstance(observation, WorkerUp):
            worker = observation.worker
            if worker.role.prefills and not worker.role.decodes:
                self.queue.worker_up(worker.id)
                self._idle_since.setdefault(worker.id, now)
                self._pull_at(now)
            else:
                self._leave(worker.id, now)
        elif isinstance(observation, WorkerDown | WorkerDraining):
            self._leave(observation.worker, now, gone=isinstance(observation, WorkerDown))

    def start(self, attempt: Attempt, start: StartPrefill, now: int) -> None:
        """Queue a prompt, or leave it to its decode worker."""
        request = self._request(attempt)
        decode = attempt.run.decode_worker
        cached = self._cached(attempt, decode, now)
        if not self.queue.workers or self.queue.config.is_local(
            request.prompt - cached, len(self.queue)
        ):
            attempt.run.prefill_worker = ""
            self._driver.observe(PrefillClaimed(request.id, decode, cached), now)
            self._driver.take(attempt, PrefillStays(start.leg), now)
            return
        self._attempts[request.id] = attempt, start.leg
        item = PrefillItem(
            request.id, request.prompt, request.arrival, start.leg, request.deadline,
            attempt.priority,
        )  # fmt: skip
        self.queue.enqueue(item, now)
        self._pull_at(now)

    def stop(self, attempt: Attempt, now: int) -> None:
        """Nobody wants a prompt any more, or another leg computes it."""
        if self._attempts.pop(attempt.lifecycle.id, None) is not None:
            self.queue.cancel(attempt.lifecycle.id)
            self._pull_at(now)

    def computed(self, leg: Leg, now: int) -> None:
        """A worker computed a prompt: it pulls the next ones once it has none."""
        id_ = leg.attempt.lifecycle.id
        self._attempts.pop(id_, None)
        self.queue.ack(id_, leg.number, now)
        if not self.queue.claims_of(leg.worker):
            self._idle_since[leg.worker] = now
        self._pull_at(now)

    # --- inside -------------------------------------------------------------------------------

    def _leave(self, worker: str, now: int, *, gone: bool = False) -> None:
        """Stop a worker's pulling; its claims go elsewhere if it is gone."""
        self._idle_since.pop(worker, None)
        self.queue.worker_stops(worker)
        if gone:
            self._answer(self.queue.worker_down(worker, now), now)
            self._pull_at(now)

    def _pull_at(self, at_ns: int) -> None:
        if at_ns < self._next_ns:
            self._next_ns = at_ns
            self._clock.at(at_ns, Phase.TICK, _KEY, self._pull)

    def _pull(self, now: int) -> None:
        if now != self._next_ns:
            return
        self._next_ns = NEVER
        for worker in filter(self._alive, self._idle_since):
            self.queue.extend(worker, now)
        self._answer(self.queue.tick(now), now)
        if len(self.queue):
            self._driver.catch_up()
            for worker in sorted(self._idle_since, key=lambda name: self._idle_since[name]):
                if self._alive(worker) and not self.queue.claims_of(worker):
                    self._claim(worker, now)
        following = self.queue.next_ns(now)
        if following < NEVER:
            self._pull_at(following)

    def _alive(self, worker: str) -> bool:
        return self._workers[worker].sim is not None

    def _claim(self, worker: str, now: int) -> None:
        claims = self.queue.claim(worker, now, lambda items: self._service(items, now))
        if claims:
            self.batches.append(len(claims))
        for claim in claims:
            self._send(claim, now)

    def _send(self, claim: PrefillClaim, now: int) -> None:
        attempt, number = self._attempts[claim.item.request]
        attempt.run.prefill_worker = claim.worker
        cached = self._cached(attempt, claim.worker, now)
        self._driver.observe(PrefillClaimed(claim.item.request, claim.worker, cached), now)
        self._driver.send_prefill(attempt, claim.worker, number, now)

    def _service(self, items: Sequence[PrefillItem], now: int) -> ServiceTable:
        requests = [self._request(self._attempts[item.request][0]) for item in items]
        return service_table(self._plane, requests, self.queue.workers, now)

    def _cached(self, attempt: Attempt, worker: str, now: int) -> int:
        return cached_at(self._plane, self._request(attempt), worker, now)

    def _request(self, attempt: Attempt) -> Request:
        assert attempt.request is not None
        return attempt.request

    def _answer(self, effects: Sequence[QueueEffect], now: int) -> None:
        for effect in effects:
            attempt, number = self._attempts.pop(effect.item.request)
            self._driver.take(attempt, RequestRefused(number, type(effect).__name__), now)
