"""Windows of a simulated fleet: what its gateway and its workers show in one interval."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pigou.control.latency_model.estimates import pairs
from pigou.control.plane import ControlPlane
from pigou.control.planner.messages import (
    LatencySummary,
    LoadWindow,
    PlannerWindow,
    PoolWindow,
    WorkerState,
    WorkerWindow,
)
from pigou.control.price_of_anarchy import PoAEstimate
from pigou.request import SECOND, Role
from pigou.sim.client import SimulatedClient
from pigou.sim.fleet import SimulatedFleet
from pigou.sim.membership import UNPLACEABLE, Membership
from pigou.sim.objectives import Objectives, request_itl_ns
from pigou.sim.request_run import RequestRun, RunOutcome
from pigou.sim.result import summary
from pigou.sim.virtual_clock import EPOCH
from pigou.sim.worker_spec import FleetWorker


@dataclass(slots=True)
class _WorkerCounts:
    """What a worker did since the last window, and what it had done by then."""

    prompts: int = 0
    tokens: int = 0
    pairs: float = 0.0
    samples: int = 0
    running: float = 0.0
    held_tokens: float = 0.0
    steps: int = 0
    busy_ns: int = 0
    prefill_ns: int = 0


class _Computed(NamedTuple):
    """A prompt that was computed: by whom, its tokens, and those of them that were not cached."""

    worker: str
    prompt: int
    uncached: int


class WindowMeter:
    """Makes the windows of a planner, each from the end of the one before.

    Latencies count from the arrival at the gateway, as it sees them. A request counts where its
    first token, or its end, falls in the window. The CPU of a worker is taken to be busy while it
    computes, as that of a process that launches kernels is.
    """

    def __init__(
        self, fleet: SimulatedFleet, membership: Membership, client: SimulatedClient,
        objectives: Objectives, model: str = "",
    ) -> None:  # fmt: skip
        """Watch a simulation that has not run yet.

        Args:
            fleet: that serves.
            membership: of the fleet.
            client: that sends.
            objectives: of requests; each class is a load of its own.
            model: that the fleet serves.
        """
        self._fleet, self._membership, self._client = fleet, membership, client
        self._objectives, self._model = objectives, model
        self._last_ns = EPOCH
        self._last_arrival_ns: dict[str, int] = {}
        self._known = 0  # of the client's runs
        self._tokens: dict[int, int] = {}  # output tokens of the open ones, at the last window
        self._open: dict[int, RequestRun] = {}
        self._workers: dict[str, _WorkerCounts] = {}

    @property
    def _plane(self) -> ControlPlane:
        return self._fleet.plane

    def sample(self, now: int) -> None:
        """Add what runs now to the means of the window."""
        state = self._plane.state
        for worker in self._fleet.workers:
            row = state.row.get(worker.name)
            if worker.sim is None or row is None:
                continue
            counts = self._counts_of(worker.name)
            counts.samples += 1
            counts.running += worker.sim.load(now)[0]
            counts.held_tokens += state.columns.decode_tokens.item(row)

    def window(self, now: int) -> PlannerWindow:
        """Return what happened since the last window."""
        seconds = (now - self._last_ns) / SECOND
        loads = self._loads(now)
        pools = tuple(
            PoolWindow(
                name=pool.name,
                role=pool.role,
                model=self._model,
                gpus=pool.spec.gpus,
                workers=tuple(self._worker(w, now) for w in self._membership.members(pool.name)),
            )
            for pool in self._membership.pools.values()
        )
        self._last_ns = now
        poa, better = _anarchy(self._fleet.assessments)
        return PlannerWindow(
            now_ns=now,
            seconds=seconds,
            loads=loads,
            pools=pools,
            price_of_anarchy={} if poa is None else {self._model: poa},
            better_prefill={} if better is None else {self._model: better},
        )

    # --- load ---------------------------------------------------------------------------------

    def _loads(self, now: int) -> tuple[LoadWindow, ...]:
        """Return the load of each class."""
        arrived = self._arrived()
        generated = self._generated()
        first, ended = self._progressed(now)
        for entry in filter(None, map(self._computed, first)):
            counts = self._counts_of(entry.worker)
            counts.prompts += 1
            counts.tokens += entry.uncached
            counts.pairs += float(pairs(entry.uncached, entry.prompt))
        queued: dict[str, list[int]] = {}
        for waiting in self._plane.queue:
            request = waiting.request
            name = self._objectives.name_of(request.tenant, request.prompt)
            queued.setdefault(name, []).append(request.prompt)
        arrived_of, first_of, ended_of, open_of = (
            self._by_class(runs) for runs in (arrived, first, ended, self._open.values())
        )
        return tuple(
            self._load(
                name, arrived_of.get(name, []), first_of.get(name, []), ended_of.get(name, []),
                queued.get(name, []), generated.get(name, 0), len(open_of.get(name, [])),
            )
            for name in self._objectives.names
        )  # fmt: skip

    def _load(
        self, name: str, arrived: list[RequestRun], first: list[RequestRun],
        ended: list[RequestRun], queued: list[int], tokens: int, in_flight: int,
    ) -> LoadWindow:  # fmt: skip
        """Return the load of one class: its requests, prompt tokens that wait, and tokens."""
        computed = [entry for run in first if (entry := self._computed(run)) is not None]
        prompt_tokens = sum(entry.prompt for entry in computed)
        uncached = sum(entry.uncached for entry in computed)
        done = [run for run in ended if run.outcome is RunOutcome.DONE]
        prompts = np.array([run.spec.prompt_tokens for run in arrived], dtype=np.float64)
        attained = None
        if self._objectives.known:
            attained = sum(self._objectives.attained(run, run.sent_ns) for run in done)
        return LoadWindow(
            model=self._model,
            workload=name,
            arrivals=len(arrived),
            isl=float(prompts.mean()) if len(prompts) else None,
            isl_scv=_scv(prompts),
            osl=_mean([run.output_tokens for run in done]),
            hit_rate=1.0 - uncached / prompt_tokens if prompt_tokens else None,
            arrival_scv=self._arrival_scv(name, arrived),
            ttft=_latency([run.first_token_ns - run.sent_ns for run in first]),
            itl=_latency([ns for run in done if (ns := request_itl_ns(run)) is not None]),
            request_s=_mean([(run.ended_ns - run.sent_ns) / SECOND for run in ended]),
            completed=len(done),
            attained=attained,
            output_tokens=float(tokens),
            queued=len(queued),
            queued_tokens=float(sum(queued)),
            in_flight=in_flight,
        )

    def _by_class(self, runs: Iterable[RequestRun]) -> dict[str, list[RequestRun]]:
        classes: dict[str, list[RequestRun]] = {}
        for run in runs:
            classes.setdefault(self._objectives.name_of_run(run), []).append(run)
        return classes

    def _generated(self) -> dict[str, int]:
        """Return the tokens that were generated since, as far as the gateway knows, by class."""
        tokens: dict[str, int] = {}
        for number, run in self._open.items():
            routed = self._plane.state.requests.get(run.attempt_id)
            total = run.output_tokens + (0 if routed is None else max(routed.generated, 0))
            name = self._objectives.name_of_run(run)
            # A further attempt of the client begins again with no token.
            tokens[name] = tokens.get(name, 0) + max(0, total - self._tokens.get(number, 0))
            self._tokens[number] = total
        return tokens

    def _arrived(self) -> list[RequestRun]:
        """Return the requests that the client meant to send since."""
        runs = self._client.runs
        arrived = runs[self._known :]
        self._known = len(runs)
        self._open |= {run.number: run for run in arrived}
        return arrived

    def _progressed(self, now: int) -> tuple[list[RequestRun], list[RequestRun]]:
        """Return the requests with a first token since, and those that ended since."""
        first, ended = [], []
        for run in list(self._open.values()):
            if self._last_ns < run.first_token_ns <= now:
                first.append(run)
            if not self._client.is_open(run):
                ended.append(run)
                del self._open[run.number], self._tokens[run.number]
        return first, ended

    def _computed(self, run: RequestRun) -> _Computed | None:
        """Return the prompt of a request with a first token, as the control plane knows it."""
        name = run.prefill_worker or run.decode_worker
        if run.moves or not name:
            return None
        routed = self._plane.state.requests.get(run.attempt_id)
        prompt = run.spec.prompt_tokens
        uncached = prompt - run.cached_tokens if routed is None else routed.uncached
        return _Computed(name, prompt, max(uncached, 1))

    def _arrival_scv(self, name: str, arrived: Sequence[RequestRun]) -> float | None:
        times = [run.intended_ns for run in arrived]
        if times and name in self._last_arrival_ns:
            times.insert(0, self._last_arrival_ns[name])
        if times:
            self._last_arrival_ns[name] = times[-1]
        return _scv(np.diff(np.array(times, dtype=np.float64)))

    # --- workers ------------------------------------------------------------------------------

    def _counts_of(self, worker: str) -> _WorkerCounts:
        return self._workers.setdefault(worker, _WorkerCounts())

    def _worker(self, worker: FleetWorker, now: int) -> WorkerWindow:
        sim, state = worker.sim, self._plane.state
        row = state.row.get(worker.name)
        life = WorkerWindow(
            id=worker.name,
            state=worker.state or WorkerState.DRAINING,
            since_ns=worker.since_ns,
            unplaceable=worker.failed_starts >= UNPLACEABLE,
        )
        if sim is None or row is None:
            return life
        counts, columns = self._counts_of(worker.name), state.columns
        running, waiting, usage = sim.load(now)
        steps, busy_ns = sim.progress()
        new_steps, new_busy_ns = steps - counts.steps, busy_ns - counts.busy_ns
        prefill_s = max(0, sim.prefill_ns - counts.prefill_ns) / SECOND  # 0 after a restart
        streams = worker.info.role is not Role.PREFILL and new_steps > 0
        block_size = worker.info.block_size
        self._workers[worker.name] = _WorkerCounts(
            steps=steps, busy_ns=busy_ns, prefill_ns=sim.prefill_ns
        )
        return WorkerWindow(
            id=life.id,
            state=life.state,
            since_ns=life.since_ns,
            unplaceable=life.unplaceable,
            queued_prefill_tokens=float(columns.prefill_tokens.item(row)),
            waiting=waiting,
            running=running,
            mean_running=counts.running / counts.samples if counts.samples else None,
            kv_usage=usage,
            kv_tokens=worker.info.blocks * block_size,
            held_tokens=float(columns.decode_tokens.item(row)),
            mean_held_tokens=counts.held_tokens / counts.samples if counts.samples else None,
            cached_tokens=float(sim.core.cached_blocks * block_size),
            computed_prompts=counts.prompts,
            computed_tokens=float(counts.tokens),
            computed_pairs=counts.pairs,
            prefill_s=prefill_s,
            itl_s=new_busy_ns / new_steps / SECOND if streams else None,
            cpu_usage=max(0, new_busy_ns) / max(now - self._last_ns, 1),
        )


def _anarchy(assessments: Sequence[PoAEstimate]) -> tuple[float | None, int | None]:
    """Return the Price of Anarchy, and the prefill workers of a better split, as last known."""
    if not assessments:
        return None, None
    latest = assessments[-1]
    better = len(latest.anarchy.prefill_workers) if latest.split is not None else None
    return latest.anarchy.whole.value, better


def _latency(nanos: Sequence[float] | np.ndarray) -> LatencySummary:
    return LatencySummary(**summary(np.asarray(nanos, dtype=np.float64)))


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _scv(values: np.ndarray) -> float | None:
    """Return the variance over the squared mean; None of fewer than two values."""
    if len(values) < 2:
        return None
    mean = float(values.mean())
    return float(values.var(ddof=1)) / mean**2 if mean else None
