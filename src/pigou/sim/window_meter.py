"""Windows of a simulated fleet: what its gateway and its workers show in one interval."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from pigou.control.plane import ControlPlane
from pigou.control.planner.actuation import UNPLACEABLE
from pigou.objectives import Objectives
from pigou.request import SECOND, Role
from pigou.sim.client import SimulatedClient
from pigou.sim.fleet import SimulatedFleet
from pigou.sim.membership import Membership
from pigou.sim.request_run import RequestRun, RunOutcome
from pigou.sim.result import class_name, is_attained, request_itl_ns
from pigou.sim.virtual_clock import EPOCH
from pigou.sim.worker_spec import FleetWorker
from pigou.windows.load_meter import (
    ComputedPrompt,
    LoadMeter,
    MeteredRequest,
    MeteredWindow,
    WorkerCounts,
    anarchy_of,
)
from pigou.windows.planner_window import (
    LoadWindow,
    PlannerWindow,
    PoolWindow,
    WorkerState,
    WorkerWindow,
)


@dataclass(slots=True)
class _Progress:
    """What a worker had done by the last window."""

    steps: int = 0
    busy_ns: int = 0
    prefill_ns: int = 0
    prefill_tokens: int = 0


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
            objectives: of requests; each class is a load of its own.
        """
        self._fleet, self._membership, self._client = fleet, membership, client
        self._objectives, self._model = objectives, model
        self._load_meter = LoadMeter(objectives, model)
        self._last_ns = EPOCH
        self._known = 0  # of the client's runs
        self._tokens: dict[int, int] = {}  # output tokens of the open ones, at the last window
        self._open: dict[int, RequestRun] = {}
        self._workers: dict[str, WorkerCounts] = {}
        self._progress: dict[str, _Progress] = {}

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
            counts.sample(worker.sim.load(now)[0], state.columns.decode_tokens.item(row))

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
        assessments = self._fleet.assessments
        anarchy, better = anarchy_of(self._model, assessments[-1] if assessments else None)
        return PlannerWindow(
            now_ns=now,
            seconds=seconds,
            loads=loads,
            pools=pools,
            price_of_anarchy=anarchy,
            better_prefill=better,
        )

    # --- load ---------------------------------------------------------------------------------

    def _loads(self, now: int) -> tuple[LoadWindow, ...]:
        """Return the load of each class."""
        arrived = self._arrived()
        generated = self._generated()
        first, ended = self._progressed(now)
        queued: dict[str, list[int]] = {}
        for waiting in self._plane.queue:
            request = waiting.request
            name = self._objectives.name_of(request.tenant, request.prompt)
            queued.setdefault(name, []).append(request.prompt)
        in_flight = Counter(class_name(self._objectives, run) for run in self._open.values())
        metered = [self._metered(run)._replace(computed=self._computed(run)) for run in first]
        for entry in (request.computed for request in metered):
            if entry is not None:
                self._counts_of(entry.worker).add_prompt(entry)
        window = MeteredWindow(
            [self._metered(run) for run in arrived], metered,
            [self._metered(run) for run in ended], generated, in_flight, queued,
        )  # fmt: skip
        return self._load_meter.loads(window)

    def _metered(self, run: RequestRun) -> MeteredRequest:
        """Return a request as the gateway saw it."""
        return MeteredRequest(
            class_name(self._objectives, run), run.spec.prompt_tokens, run.intended_ns,
            run.sent_ns, run.first_token_ns, run.ended_ns, run.output_tokens, request_itl_ns(run),
            run.outcome is RunOutcome.DONE, is_attained(self._objectives, run, run.sent_ns),
        )  # fmt: skip

    def _generated(self) -> dict[str, int]:
        """Return the tokens that were generated since, as far as the gateway knows, by class."""
        tokens: dict[str, int] = {}
        for number, run in self._open.items():
            routed = self._plane.state.requests.get(run.attempt_id)
            total = run.output_tokens + (0 if routed is None else max(routed.generated, 0))
            name = class_name(self._objectives, run)
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

    def _computed(self, run: RequestRun) -> ComputedPrompt | None:
        """Return the prompt of a request with a first token, as the control plane knows it."""
        name = run.prefill_worker or run.decode_worker
        if run.moves or not name:
            return None
        routed = self._plane.state.requests.get(run.attempt_id)
        prompt = run.spec.prompt_tokens
        uncached = prompt - run.cached_tokens if routed is None else routed.uncached
        return ComputedPrompt(name, prompt, max(uncached, 1))

    # --- workers ------------------------------------------------------------------------------

    def _counts_of(self, worker: str) -> WorkerCounts:
        return self._workers.setdefault(worker, WorkerCounts())

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
        counts, columns = self._workers.pop(worker.name, WorkerCounts()), state.columns
        before = self._progress.get(worker.name, _Progress())
        running, waiting, usage = sim.load(now)
        steps, busy_ns = sim.progress()
        new_steps, new_busy_ns = steps - before.steps, busy_ns - before.busy_ns
        meter = sim.meter
        prefill_s = max(0, meter.prefill_ns - before.prefill_ns) / SECOND  # 0 after a restart
        counts.observe_tokens(max(0, meter.prefill_tokens - before.prefill_tokens))
        streams = worker.info.role is not Role.PREFILL and new_steps > 0
        block_size = worker.info.block_size
        self._progress[worker.name] = _Progress(
            steps, busy_ns, meter.prefill_ns, meter.prefill_tokens
        )
        return WorkerWindow(
            id=life.id,
            state=life.state,
            since_ns=life.since_ns,
            unplaceable=life.unplaceable,
            location=worker.info.location,
            queued_prefill_tokens=float(columns.prefill_tokens.item(row)),
            waiting=waiting,
            running=running,
            mean_running=counts.mean_running,
            kv_usage=usage,
            kv_tokens=worker.info.blocks * block_size,
            held_tokens=float(columns.decode_tokens.item(row)),
            mean_held_tokens=counts.mean_held_tokens,
            cached_tokens=float(sim.core.cached_blocks * block_size),
            computed_prompts=counts.prompts,
            computed_tokens=float(counts.tokens),
            computed_pairs=counts.pairs,
            prefill_s=prefill_s,
            itl_s=new_busy_ns / new_steps / SECOND if streams else None,
            cpu_usage=max(0, new_busy_ns) / max(now - self._last_ns, 1),
        )
