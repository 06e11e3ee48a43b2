"""The cost meter: bills of tenants from the calls of a control plane, live or in a journal."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pigou.config import ControlConfig
from pigou.control.admission.usage_prices import KVResidency
from pigou.control.messages import (
    Action,
    CacheChanged,
    CacheKeyed,
    Decision,
    Ended,
    FirstToken,
    LoadReport,
    Observation,
    PrefillClaimed,
    PrefillDone,
    ReadFailed,
    Recall,
    Route,
    Shed,
    Submit,
    Tick,
    Tokens,
    WorkerDown,
    WorkerUp,
)
from pigou.control.plane import ControlPlane
from pigou.control.routing.policy import RoutingPolicy
from pigou.cost.fleet_bill import FleetBill
from pigou.cost.usage import Payer, Usage, UsageKey, WorkerRate
from pigou.cost.worker_meter import WorkerMeter
from pigou.request import SECOND, Request, Worker

#: Nanoseconds between settlements.
SETTLE_NS = SECOND
#: Ended requests whose bills are kept.
_MAX_BILLS = 4096
#: Frequent messages without costs.
_SILENT = (CacheChanged, CacheKeyed, LoadReport)


@dataclass(slots=True)
class _Routed:
    request: Request
    route: Route
    payer: Payer
    computes: WorkerMeter | None = None  # until its prompt is computed
    decodes: WorkerMeter | None = None
    due_ns: int = 0  # expected end of a prompt that no driver reports; else 0
    kv_token_s: float = 0.0  # charged so far


class CostMeter:
    """Splits a fleet's cost among its requests, and totals it by tenant, model and class."""

    def __init__(
        self, rate: Callable[[Worker], WorkerRate], model: Callable[[str], str] = lambda _: "",
        workload: Callable[[Request], str] = lambda _: "",
        storage: Callable[[Mapping[str, float]], float] = lambda _: 0.0,
    ) -> None:  # fmt: skip
        """Set the prices of workers and tiers (bytes by name), and the labels of bills."""
        self._storage = storage
        self.workers: dict[str, WorkerMeter] = {}  # live workers by id
        self.bills: OrderedDict[str, Usage] = OrderedDict()  # last requests by id
        self.owners: dict[str, str] = {}  # tenants of `bills`
        self.rate, self.model, self.workload = rate, model, workload
        #: recomputed tokens per token written, by worker (`PrefixIndex.recomputed_share`)
        self.displaced: Mapping[str, float] = {}
        self._kv = KVResidency()
        self._usages: dict[UsageKey, Usage] = {}
        self._submitted: dict[str, Request] = {}
        self._routed: dict[str, _Routed] = {}
        self._past: list[WorkerMeter] = []
        self._began: int | None = None
        self.now_ns = 0
        self._settled_ns = 0

    def follow(self, message: Any, decisions: Sequence[Any], now: int) -> None:
        """Take in a control-plane call and its decisions, in journal form."""
        if self._began is None:
            self._began = self._settled_ns = now
        self.now_ns = now
        self._take(message, now)
        for decision in decisions:
            if type(decision) is Route:
                self._route(decision, now)
            elif type(decision) is Recall:
                self._release(decision.request, now)
            elif type(decision) is Shed:
                self._release(decision.request, now)
                self._submitted.pop(decision.request, None)
        if type(message) is Tick:
            self._tick(now)

    def settle(self, now: int) -> None:
        """Charge all seconds until `now` (ns)."""
        self._settled_ns = now
        for worker in self.workers.values():
            worker.settle(now)
        for request, routed in self._routed.items():
            self._charge_kv(request, routed, now)

    def stores(self, worker: str, tiers: Mapping[str, float]) -> None:
        """Set a worker's tiers beyond the device since its start: bytes by name."""
        if worker in self.workers:
            meter = self.workers[worker]
            meter.rate = replace(meter.rate, storage_usd_per_s=self._storage(tiers))

    def measured(self, worker: str, joules: float) -> None:
        """Add joules that a worker's energy counter rose by."""
        if worker in self.workers:
            self.workers[worker].measured(joules)

    def bill(self, now: int, attained: float | None = None) -> FleetBill:
        """Return the bill until `now` (ns); `attained` is the share inside the objective."""
        self.settle(now)
        meters = [*self._past, *self.workers.values()]
        seconds = 0.0 if self._began is None else (now - self._began) / SECOND
        return FleetBill(
            seconds=seconds,
            gpu_s=sum(meter.rate.gpus * meter.seconds for meter in meters),
            gpu_usd=sum(meter.rate.usd_per_s * meter.seconds for meter in meters),
            idle_usd=sum(meter.rate.usd_per_s * meter.idle_s for meter in meters),
            open_usd=sum(meter.rate.usd_per_s * meter.open_s for meter in meters),
            storage_usd=sum(meter.rate.storage_usd_per_s * meter.seconds for meter in meters),
            joules=sum(meter.joules for meter in meters),
            idle_joules=sum(meter.idle_joules for meter in meters),
            open_joules=sum(meter.open_joules for meter in meters),
            usages=dict(self._usages),
            attained=attained,
            has_tolls=all(math.isfinite(meter.rate.weight_tokens) for meter in meters),
        )

    # --- a call ---------------------------------------------------------------------------------

    def _take(self, message: Any, now: int) -> None:
        match message:
            case Tokens(counts):
                for request, count in counts:
                    self._tokens(request, count, now)
            case Submit(request):
                self._release(request.id, now)
                self._submitted[request.id] = request
            case FirstToken(request):
                self._computed(request, now)
            case PrefillDone(request, well):
                self._prefilled(request, well, now)
            case PrefillClaimed(request, worker, cached):
                self._claimed(request, worker, cached, now)
            case ReadFailed(request):
                self._read_failed(request)
            case Ended(request):
                self._release(request, now)
                self._submitted.pop(request, None)
            case WorkerUp(worker):
                self._up(worker, now)
            case WorkerDown(worker):
                self._down(worker, now)

    def _up(self, worker: Worker, now: int) -> None:
        if worker.id not in self.workers:
            self.workers[worker.id] = WorkerMeter(self.rate(worker), now, worker.rehearsed)

    def _down(self, worker: str, now: int) -> None:
        meter = self.workers.pop(worker, None)
        if meter is not None:
            meter.settle(now, final=True)
            self._past.append(meter)

    def _route(self, route: Route, now: int) -> None:
        self._release(route.request, now)
        request = self._submitted.get(route.request)
        if request is None:
            return
        choice = route.choice
        model = request.model or self.model(choice.decode)
        key = UsageKey(request.tenant, model, self.workload(request))
        bill = self.bills.setdefault(request.id, Usage())
        self.owners[request.id] = request.tenant
        if len(self.bills) > _MAX_BILLS:
            del self.owners[self.bills.popitem(last=False)[0]]
        payer = Payer((self._usages.setdefault(key, Usage()), bill))
        payer.add("requests", 1)
        payer.add("sequences", request.sequences)
        payer.add("cached_tokens", min(choice.computed, request.prompt - 1))
        moved = 0 if choice.read is None else choice.read.tokens
        payer.add("read_tokens", moved + (0 if choice.prefill is None else request.prompt))
        worker = self.workers.get(choice.prefill or choice.decode)
        decode = self.workers.get(choice.decode)
        routed = self._routed[request.id] = _Routed(request, route, payer, worker, decode)
        self._kv.began(request, choice.decode, now)
        if worker is None:
            return
        uncached = max(request.prompt - choice.computed, 1)
        self._write(payer, choice.prefill or choice.decode, uncached)
        if not request.streamed and choice.prefill is None:
            routed.due_ns = now + round(worker.prompt_seconds(uncached) * SECOND)
        restore_s = 0.0 if choice.read is None else choice.read.seconds
        worker.prompt_sent(request.id, payer, uncached, now, restore_s)

    def _claimed(self, request: str, worker: str, cached: int, now: int) -> None:
        routed = self._routed.get(request)
        if routed is None:
            return
        if routed.computes is not None:
            routed.computes.prompt_ended(request, now, computed=False)
        routed.computes = self.workers.get(worker)
        if routed.computes is not None:
            tokens = max(routed.request.prompt - cached, 1)
            routed.computes.prompt_sent(request, routed.payer, tokens, now)

    def _read_failed(self, request: str) -> None:
        routed = self._routed.get(request)
        if routed is None:
            return
        cached = routed.route.choice.cached
        routed.payer.add("cached_tokens", cached - routed.route.choice.computed)
        if routed.computes is not None:
            routed.computes.prompt_changed(request, routed.request.prompt - cached)

    def _prefilled(self, request: str, well: bool, now: int) -> None:
        routed = self._routed.get(request)
        if routed is None or routed.route.choice.prefill is None:
            return
        if routed.computes is not None and routed.computes is not routed.decodes:
            routed.computes.prompt_ended(request, now, computed=well)
            routed.computes = None

    def _computed(self, request: str, now: int, is_seen: bool = True) -> None:
        routed = self._routed.get(request)
        if routed is None:
            return
        if routed.computes is not None:
            routed.computes.prompt_ended(request, now, is_seen=is_seen)
            routed.computes = None
        if routed.decodes is not None:
            sequence = routed.request
            routed.decodes.stream_began(
                request, routed.payer, sequence.prompt, sequence.sequences, now
            )

    def _tokens(self, request: str, count: int, now: int) -> None:
        routed = self._routed.get(request)
        if routed is None:
            return
        if routed.due_ns:  # a reply in one piece: its prompt is computed
            ended_ns, routed.due_ns = min(routed.due_ns, now), 0
            self._computed(request, ended_ns, is_seen=False)
        routed.payer.add("output_tokens", count)
        self._kv.grew(request, count, now)
        self._write(routed.payer, routed.route.choice.decode, count)
        if routed.decodes is not None:
            routed.decodes.stream_tokens(request, count, now)

    def _release(self, request: str, now: int) -> None:
        routed = self._routed.pop(request, None)
        if routed is None:
            return
        self._charge_kv(request, routed, now)
        self._kv.ended(request, now)
        if routed.computes is not None:
            routed.computes.prompt_ended(request, now, computed=False)
        if routed.decodes is not None:
            routed.decodes.stream_ended(request, now)

    def _charge_kv(self, request: str, routed: _Routed, now: int) -> None:
        held = self._kv.request_token_s(request, now)
        routed.payer.add("kv_token_s", held - routed.kv_token_s)
        routed.kv_token_s = held

    def _write(self, payer: Payer, worker: str, tokens: int) -> None:
        """Charge the cached tokens that written ones push out, at the price of the moment."""
        share = self.displaced.get(worker, 0.0)
        if share > 0.0:
            payer.add("displaced_tokens", tokens * share)

    def _tick(self, now: int) -> None:
        for request, routed in self._routed.items():
            if 0 < routed.due_ns <= now:
                ended_ns, routed.due_ns = routed.due_ns, 0
                self._computed(request, ended_ns, is_seen=False)
        for worker in self.workers.values():
            worker.tick(now)
        if now - self._settled_ns >= SETTLE_NS:
            self.settle(now)


class MeteredControlPlane(ControlPlane):
    """A ControlPlane that reports each call to a cost meter; decisions are unchanged."""

    def __init__(
        self, config: ControlConfig, cost_meter: CostMeter, policy: RoutingPolicy | None = None
    ) -> None:
        """As `ControlPlane`."""
        super().__init__(config, policy)
        self.cost_meter = cost_meter

    def submit(self, request: Request, now: int, exclude: frozenset[str] = frozenset()) -> Decision:
        """As `ControlPlane.submit`."""
        decision = super().submit(request, now, exclude)
        self.cost_meter.follow(Submit(request), (decision,), now)
        return decision

    def observe(self, observation: Observation, now: int) -> Sequence[Decision]:
        """As `ControlPlane.observe`."""
        decisions = super().observe(observation, now)
        if decisions or type(observation) not in _SILENT:
            self.cost_meter.follow(observation, decisions, now)
        return decisions

    def on_tokens(self, slots: NDArray[np.int64], counts: NDArray[np.int64], now: int) -> None:
        """As `ControlPlane.on_tokens`."""
        super().on_tokens(slots, counts, now)
        pairs = zip(self.requests_in(slots), counts.tolist(), strict=True)
        self.cost_meter.follow(Tokens(tuple(pairs)), (), now)

    def tick(self, now: int) -> Sequence[Action]:
        """As `ControlPlane.tick`."""
        decisions = super().tick(now)
        shares = self.index.recomputed_share(self.state.ids)
        self.cost_meter.displaced = dict(zip(self.state.ids, shares.tolist(), strict=True))
        self.cost_meter.follow(Tick(), decisions, now)
        return decisions
