"""Drives a ControlPlane by the wall clock, with an upstream for each worker."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import aiohttp
import msgspec
import numpy as np

from pigou.background import Background
from pigou.control.degradation import Degradation
from pigou.control.journal import JournalEntry, JournalRecorder, PlaneCalls, report_tokens
from pigou.control.messages import (
    Action,
    Assess,
    Assessed,
    Decision,
    Ended,
    FirstToken,
    Observation,
    Queue,
    Recall,
    Route,
    SetEngineLimits,
    Shed,
    WorkerDown,
    WorkerUp,
)
from pigou.control.plane import ControlPlane
from pigou.gateway.engine_limits import EngineLimiter
from pigou.gateway.failure import WorkerFailed
from pigou.gateway.journal import Journal
from pigou.gateway.prompt_reader import PromptReader
from pigou.gateway.proxy.upstream import Engine, Upstream
from pigou.gateway.request import GatewayRun, StreamCount
from pigou.gateway.request_meter import RequestMeter
from pigou.lifecycle.suspicion import WorkerEnd
from pigou.objectives import Objectives
from pigou.request import SECOND, FinishReason, Request, Role, Worker
from pigou.windows.prompts import PromptWaits, RepeatedPrompts, prompt_key
from pigou.wire.errors import bad_request

_TICK_S = 0.1
#: Seconds between placements of LoRA adapters, and of a load at most.
_PLACEMENT_S, _LOAD_S = 5.0, 60.0


class PrefillLeg(NamedTuple):
    """A prefill leg to send to a worker."""

    path: str
    wire_id: str  # id of the request in headers and logs
    mark: str  # mark of the tenant; empty for none
    body: Mapping[str, Any]  # JSON of the request
    worker: str  # the control plane's choice; workers of the same pool may pull the prompt
    traceparent: str = ""  # the waiting span; empty if not traced


class LocalPrefill(Exception):
    """Prefill stays local; the message is the metric's label."""


class GatewayPrefillQueue(Protocol):
    """A queue that prefill workers pull from."""

    @property
    def length(self) -> int:
        """Waiting and claimed prompts of all gateways."""
        ...

    async def run(self) -> None:
        """Stay connected until cancelled."""
        ...

    async def prefill(
        self, request: Request, leg: PrefillLeg, on_claim: Callable[[str, int], None]
    ) -> bytes:
        """Enqueue a prompt, and return the reply; `on_claim` gets the worker.

        Raises LocalPrefill if no worker pulls, and APIError.
        """
        ...


class Interruptible(Protocol):
    """A request's driver that the control plane can interrupt."""

    def interrupt(self, decision: Recall | Shed) -> bool:
        """Apply a decision on a routed request; True if it changes anything."""
        ...


class PlaneDriver:
    """Maps decisions to futures, and events to observations."""

    def __init__(
        self,
        plane: ControlPlane,
        prompts: PromptReader | None = None,
        journal: Journal | None = None,
        objectives: Objectives | None = None,
        *,
        model: str = "",
        sibling: PlaneDriver | None = None,
    ) -> None:
        """Drive a plane; `sibling` is another model's driver, with shared background tasks."""
        self.plane = plane
        self.prompts = prompts
        if prompts is not None and plane.tracker.lengths is not None:
            prompts.counts_words = True
        self.background: Background = Background() if sibling is None else sibling.background
        self._journal = journal
        self._recorded: PlaneCalls = (
            plane if journal is None else JournalRecorder(plane, journal.write)
        )
        self.upstreams: dict[str, Upstream] = {}  # live workers by id
        self._computes_locally = True  # False if decode workers compute no prompts, as SGLang's
        self.limits = EngineLimiter(self.background, self._resize)
        self.joining = asyncio.Lock()  # while a worker is compared with the others, and comes up
        self._hosts: dict[str, str] = {}  # by worker, former workers included
        self._served_model = model
        self.meter = RequestMeter(objectives or Objectives(), self._model)
        self.shed = 0
        self.repeated, self.prompt_waits = RepeatedPrompts(), PromptWaits(self._prefill_s)
        self.degradation = Degradation()
        self.peers_health: Callable[[], dict[str, Any]] | None = None  # None without a bus
        self.prefill_queue: GatewayPrefillQueue | None = None  # None where prompts are pushed
        # Set while the plane's kernels are compiled; the plane is not to be called before.
        self.compiled: asyncio.Event = asyncio.Event() if sibling is None else sibling.compiled
        if sibling is None:
            self.compiled.set()
        self.timed: Callable[[float], None] = lambda _: None  # gets the seconds of each decision
        self._queued: dict[str, asyncio.Future[Route | Shed]] = {}
        self._streams: dict[str, tuple[StreamCount, int]] = {}
        self.drivers: dict[str, Interruptible] = {}  # by open request: they get recalls and sheds
        self._woken: set[asyncio.Event] = set()
        self.places_adapters = False
        self._ticker: asyncio.Task[None] | None = None
        self._placing: asyncio.Task[None] | None = None
        self._assessing: asyncio.Task[None] | None = None
        self._pulling: asyncio.Task[None] | None = None

    def _model(self) -> str:
        for upstream in self.upstreams.values():
            self._served_model = upstream.engine.model
            break
        return self._served_model

    def write(self, entry: JournalEntry) -> None:
        """Append a planner's entry to the journal, if any."""
        if self._journal is not None:
            self._journal.write(entry)

    def start(self) -> None:
        """Start the ticker; call it on the event loop."""
        if self.prefill_queue is not None:
            self._pulling = self.background.start("prefill queue", self.prefill_queue.run)
        self._ticker = self.background.start("control plane ticks", self._tick)
        if self.places_adapters:
            self._placing = self.background.start("adapter placement", self._place_adapters)

    async def stop(self) -> None:
        """Stop the ticker, and close all connections."""
        for task in (self._pulling, self._placing):
            if task is not None:
                task.cancel()
                await asyncio.wait((task,), timeout=1.0)
        if self._ticker is not None:
            self._ticker.cancel()
            with suppress(asyncio.CancelledError):
                await self._ticker
        if self._assessing is not None:
            await asyncio.gather(self._assessing, return_exceptions=True)
        for upstream in list(self.upstreams.values()):
            self.limits.down(upstream.worker.id)
            await upstream.close()
        self.upstreams.clear()
        if self.prompts is not None:
            self.prompts.close()
        if self._journal is not None:
            self._journal.close()

    async def up(self, worker: Worker, engine: Engine, secret: str = "") -> None:
        """Add a ready worker."""
        if worker.id in self.upstreams:
            await self.upstreams.pop(worker.id).close()
        upstream = Upstream(worker, engine, secret)
        if self.prompts is not None:
            try:
                await self.prompts.meet(upstream)
            except BaseException:
                await upstream.close()
                raise
        self.upstreams[worker.id] = upstream
        self._note_engines()
        self._hosts[worker.id] = worker.location.host
        self.observe(WorkerUp(worker))
        self.limits.up(upstream)

    async def down(self, worker: str, end: WorkerEnd = WorkerEnd.LOST) -> None:
        """Remove a worker, and cut its connections so that its requests migrate."""
        upstream = self.upstreams.pop(worker, None)
        self._note_engines()
        self.limits.down(worker)
        self.observe(WorkerDown(worker))
        if upstream is not None:
            await upstream.close(end)

    def flip(self, worker: str, role: Role) -> None:
        """Change a worker's role; connections and cache stay."""
        upstream = self.upstreams[worker]
        upstream.worker = replace(upstream.worker, role=role)
        self._note_engines()
        self.observe(WorkerUp(upstream.worker))
        self.limits.follow(worker)

    def _note_engines(self) -> None:
        ups = self.upstreams.values()
        self._computes_locally = not any(
            up.engine.family == "sglang" and up.worker.role is Role.DECODE for up in ups
        )

    def _resize(self, upstream: Upstream, max_seqs: int) -> None:
        """Tell the plane how many streams a worker takes from now on."""
        upstream.worker = replace(upstream.worker, max_seqs=max_seqs)
        if upstream.worker.id not in self.plane.state.draining:
            self.observe(WorkerUp(upstream.worker))

    async def read(self, run: GatewayRun) -> None:
        """Add the prompt's tokens and block keys to a run, if known."""
        if self.prompts is not None and run.parsed.single:
            await self.prompts.read(run, list(self.upstreams.values()))

    def upstream(self, worker: str) -> Upstream:
        """Return the upstream of a worker; raise `WorkerFailed` when it is gone."""
        upstream = self.upstreams.get(worker)
        if upstream is None:
            raise WorkerFailed("connect", f"{worker} is gone", frozenset({worker}))
        return upstream

    def may_add(self, run: GatewayRun, own: int) -> bool:
        """True if a request with `own` sequences under way may send another."""
        prompt = max(1, run.prompt_tokens // len(run.parsed.prompts))
        return self.plane.may_add(own, prompt, run.parsed.max_tokens, time.monotonic_ns())

    @contextmanager
    def woken(self, event: asyncio.Event) -> Iterator[None]:
        """Set an event at each tick (context)."""
        self._woken.add(event)
        try:
            yield
        finally:
            self._woken.discard(event)

    def exclude_hosts(self, failed: frozenset[str]) -> frozenset[str]:
        """Return all workers on the hosts of `failed` ones; `failed` if no other decodes."""
        hosts = {self._hosts.get(worker, "") for worker in failed} - {""}
        ups = [upstream.worker for upstream in self.upstreams.values()]
        near = {worker.id for worker in ups if worker.location.host in hosts}
        draining = self.plane.state.draining
        others = [w for w in ups if w.role.decodes and w.id not in failed | near | draining]
        return failed | near if others else failed

    def serving(self, adapter: str) -> frozenset[str]:
        """Return the ids of workers with an adapter."""
        ups = self.upstreams.values()
        return frozenset(up.worker.id for up in ups if adapter in up.engine.served.adapters)

    async def _place_adapters(self) -> None:
        """Load adapters on the workers that get a copy in the caching game."""
        while True:
            await asyncio.sleep(_PLACEMENT_S)
            placement = self.plane.tracker.adapters.placement(time.monotonic_ns())
            for worker, names in placement.items():
                for name in names:
                    await self._load_adapter(worker, name)

    async def _load_adapter(self, worker: str, name: str) -> None:
        """Load an adapter on a worker from where another one has it; a refusal is left alone."""
        upstream = self.upstreams.get(worker)
        cards = (up.engine.served.adapters.get(name) for up in self.upstreams.values())
        card = next((card for card in cards if card is not None and card.parent), None)
        if upstream is None or card is None or name in upstream.engine.served.adapters:
            return
        body = {"lora_name": name, "lora_path": card.root}
        with suppress(aiohttp.ClientError, OSError, TimeoutError):
            await upstream.get("/v1/load_lora_adapter", _LOAD_S, "POST", body)

    async def decide(self, request: Request, exclude: frozenset[str]) -> Route | Shed:
        """Submit a request; return its route or refusal; raise `ConfigError`."""
        start = time.monotonic_ns()
        if not self._computes_locally:
            request = msgspec.structs.replace(request, local=False)
        self.repeated.arrive(request.id, prompt_key(request), start / SECOND)
        decision = self._recorded.submit(request, start, exclude)
        self.prompt_waits.arrive(request.id, request.prompt, (request.arrival or start) / SECOND)
        self.timed((time.monotonic_ns() - start) / SECOND)
        if isinstance(decision, Queue):
            decision = await self._wait(request.id)
        if self.degradation.modes:
            self.degradation.meter.decided(time.monotonic_ns(), shed=isinstance(decision, Shed))
        if isinstance(decision, Shed):
            self.shed += 1
            self.repeated.end(request.id, time.monotonic(), served=False)
            self.prompt_waits.end(request.id, time.monotonic())
            return decision
        assert isinstance(decision, Route)
        self.prompt_waits.route(request.id, time.monotonic(), streamed=request.streamed)
        return decision

    def _prefill_s(self, request: str) -> float:
        """Return the forecast of a routed request's own prefill; 0 if it is gone."""
        state = self.plane.state
        routed = state.requests.get(request)
        worker = routed and (routed.prefill or routed.decode)
        if not routed or not worker:
            return 0.0
        known, tokens = self.plane.tracker.latency_model.peek(time.monotonic_ns()), routed.uncached
        rows = np.array([state.row[worker]])
        return known.service(rows, np.array([float(tokens)]), routed.request.prompt).item()

    def tenant_loads(self) -> tuple[Counter[str], Counter[str]]:
        """Return waiting requests, at workers as well, and tokens of running ones, by tenant."""
        requests = self.plane.state.requests
        waiting = Counter(queued.request.tenant for queued in self.plane.queue)
        late = {id for id in self.prompt_waits.late(time.monotonic()) if id in requests}
        waiting.update(requests[id].request.tenant for id in late)
        tokens = Counter[str]()
        for id, routed in requests.items():
            if id not in late:
                tokens[routed.request.tenant] += routed.tokens
        return waiting, tokens

    async def _wait(self, request: str) -> Route | Shed:
        """Wait for the decision on a queued request."""
        future: asyncio.Future[Route | Shed] = asyncio.get_running_loop().create_future()
        self._queued[request] = future
        try:
            return await future
        finally:
            self._queued.pop(request, None)

    def observe(self, observation: Observation) -> None:
        """Report an observation to ControlPlane, and wake the requests it decides."""
        if isinstance(observation, FirstToken):
            self.prompt_waits.begin(observation.request, time.monotonic())
        self._wake(self._recorded.observe(observation, time.monotonic_ns()))

    def on_tokens(self, counts: Sequence[tuple[str, int]]) -> None:
        """Report new output tokens to ControlPlane: pairs of request id and count."""
        report_tokens(self._recorded, counts, time.monotonic_ns())

    def end(self, request: str, reason: FinishReason) -> None:
        """Report the end of a request."""
        stream, reported = self._streams.pop(request, (None, 0))
        if stream is not None and stream.counted > reported:
            self.on_tokens(((request, stream.counted - reported),))
        served = reason in (FinishReason.STOP, FinishReason.LENGTH)
        self.repeated.end(request, time.monotonic(), served=served)
        self.prompt_waits.end(request, time.monotonic())
        self.observe(Ended(request, reason))

    def watch(self, request: str, stream: StreamCount) -> None:
        """Report a stream's tokens at each tick, until its request ends."""
        self._streams[request] = (stream, stream.counted)

    @property
    def heeds_deadlines(self) -> bool:
        """True if admission order or a worker uses `deadline_ms`."""
        within = self.plane.config.admission.get("within")
        if self.plane.queue.order.refuses_late or within == "edf":
            return True
        return any(up.engine.deadlines for up in self.upstreams.values())

    def check_deadline(self, deadline_ms: int | None) -> None:
        """Raise `APIError` 400 for a deadline that nothing uses."""
        if deadline_ms is not None and self.upstreams and not self.heeds_deadlines:
            raise bad_request(
                f"deadline_ms is {deadline_ms}; nobody here goes by deadlines: start the gateway "
                "with --admission edf, or its workers with --order edf, or remove the field.",
                "deadline_ms",
            )

    @property
    def queue_timeout_s(self) -> float:
        """Maximum seconds of a request in the queue."""
        return self.plane.config.queue_timeout / SECOND

    @property
    def held(self) -> int:
        """Unsent sequences of accepted requests, besides those `queued`."""
        return self.plane.queue.quota.reserved

    @property
    def queued(self) -> int:
        """Requests that wait for a worker."""
        return len(self.plane.queue)

    def _wake(self, decisions: Sequence[Decision] | Sequence[Action]) -> None:
        for decision in decisions:
            if isinstance(decision, Assess):
                self._assessing = asyncio.create_task(self._assess(decision), name="assess")
                continue
            if isinstance(decision, SetEngineLimits):
                self.limits.set_fleet(decision.limits)
                continue
            future = self._queued.get(decision.request)
            if isinstance(decision, Recall) or (future is None and isinstance(decision, Shed)):
                driver = self.drivers.get(decision.request)
                changed = driver is not None and driver.interrupt(decision)
                self.shed += changed and isinstance(decision, Shed)
            elif isinstance(decision, Route | Shed) and future is not None and not future.done():
                future.set_result(decision)

    async def _assess(self, request: Assess) -> None:
        estimate = None
        try:
            estimate = await asyncio.to_thread(self.plane.assess, request.snapshot)
        except Exception as error:
            self.background.failed("assessment", error)
        finally:
            self.observe(Assessed(estimate))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            await self.compiled.wait()
            fresh: list[tuple[str, int]] = []
            for request, (stream, reported) in list(self._streams.items()):
                if stream.counted > reported:
                    self._streams[request] = (stream, stream.counted)
                    fresh.append((request, stream.counted - reported))
            self.on_tokens(fresh)
            self._wake(self._recorded.tick(now := time.monotonic_ns()))
            if self.degradation.modes:
                self.degradation.update(now, self.plane.queue.waited_s(now))
            for event in self._woken:
                event.set()
