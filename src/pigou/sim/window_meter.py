"""Windows of a simulated fleet: load of gateway and workers in one interval."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from pigou.control.plane import ControlPlane
from pigou.control.planner.actuation import UNPLACEABLE
from pigou.control.planner.tenant_load import TenantLoad, TenantWork
from pigou.objectives import Objectives
from pigou.request import SECOND, Role
from pigou.sim.client import SimulatedClient
from pigou.sim.fleet import SimulatedFleet
from pigou.sim.membership import Membership
from pigou.sim.request_run import RequestRun, RunOutcome
from pigou.sim.result import class_name, is_attained, request_itl_ns
from pigou.sim.virtual_clock import EPOCH
from pigou.sim.worker_spec import FleetWorker
from pigou.windows.builder import (
    ComputedPrompt,
    LoadMeter,
    MeteredRequest,
    MeteredWindow,
    PlannerWindowBuilder,
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
    steps: int = 0
    busy_ns: int = 0
    prefill_ns: int = 0
    prefill_tokens: int = 0


def generated_tokens(plane: ControlPlane, run: RequestRun) -> int:
    """Return a request's output tokens, as far as the gateway knows."""
    routed = plane.state.requests.get(run.attempt_id)
    return run.output_tokens + (0 if routed is None else max(routed.generated, 0))


class WindowMeter:
    """Makes a planner's windows; a request counts where its first token or its end falls."""

    def __init__(
        self, fleet: SimulatedFleet, membership: Membership, client: SimulatedClient,
        objectives: Objectives, model: str = "",
    ) -> None:  # fmt: skip
        self._fleet, self._membership, self._client = fleet, membership, client
        self._objectives, self._model = objectives, model
        self._load_meter = LoadMeter(objectives, model)
        self._builder = PlannerWindowBuilder(EPOCH)
        self._known = 0  # index into the client's runs
        self._tokens: dict[int, int] = {}  # output tokens of open requests at the last window
        self._open: dict[int, RequestRun] = {}
        self._progress: dict[str, _Progress] = {}
        self._work = TenantWork(EPOCH)

    def tenant_load(self, now: int) -> TenantLoad:
        """Return the load of tenants at the last window."""
        running = (
            (run.spec.tenant, run.spec.prompt_tokens + self._tokens[number])
            for number, run in self._open.items()
        )
        return TenantLoad(self._work.recent(now, running), self._plane.config.tenant_weights)

    @property
    def _plane(self) -> ControlPlane:
        return self._fleet.plane

    def sample(self, now: int) -> None:
        """Sample the running load."""
        state = self._plane.state
        for worker in self._fleet.workers:
            row = state.row.get(worker.name)
            if worker.sim is None or row is None:
                continue
            self._builder.counts_of(worker.name).sample(
                worker.sim.load(now)[0], state.columns.decode_tokens.item(row)
            )

    def window(self, now: int) -> PlannerWindow:
        """Return the window since the last."""
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
        assessments = self._fleet.assessments
        poa = assessments[-1] if assessments else None
        return self._builder.window(now, loads, pools, {self._model: poa})

    # --- load ---------------------------------------------------------------------------------

    def _loads(self, now: int) -> tuple[LoadWindow, ...]:
        arrived = self._arrived()
        generated = self._generated()
        first, ended = self._progressed(now)
        for run in ended:
            self._work.add(run.spec.tenant, run.spec.prompt_tokens + run.output_tokens, now)
        queued: dict[str, list[int]] = {}
        for waiting in self._plane.queue:
            request = waiting.request
            name = self._objectives.name_of(request.tenant, request.prompt)
            queued.setdefault(name, []).append(request.prompt)
        in_flight = Counter(class_name(self._objectives, run) for run in self._open.values())
        metered = [self._metered(run)._replace(computed=self._computed(run)) for run in first]
        for entry in (request.computed for request in metered):
            if entry is not None:
                self._builder.counts_of(entry.worker).add_prompt(entry)
        window = MeteredWindow(
            [self._metered(run) for run in arrived], metered,
            [self._metered(run) for run in ended], generated, in_flight, queued,
        )  # fmt: skip
        return self._load_meter.loads(window)

    def _metered(self, run: RequestRun) -> MeteredRequest:
        return MeteredRequest(
            class_name(self._objectives, run), run.spec.prompt_tokens, run.intended_ns,
            run.sent_ns, run.first_token_ns, run.ended_ns, run.output_tokens, request_itl_ns(run),
            run.outcome is RunOutcome.DONE, is_attained(self._objectives, run, run.sent_ns),
        )  # fmt: skip

    def _generated(self) -> dict[str, int]:
        """Return the tokens that were generated since, as far as the gateway knows, by class."""
        tokens: dict[str, int] = {}
        for number, run in self._open.items():
            total = generated_tokens(self._plane, run)
            name = class_name(self._objectives, run)
            # A further attempt of the client begins again with no token.
            tokens[name] = tokens.get(name, 0) + max(0, total - self._tokens.get(number, 0))
            self._tokens[number] = total
        return tokens

    def _arrived(self) -> list[RequestRun]:
        runs = self._client.runs
        arrived = runs[self._known :]
        self._known = len(runs)
        self._open |= {run.number: run for run in arrived}
        return arrived

    def _progressed(self, now: int) -> tuple[list[RequestRun], list[RequestRun]]:
        first, ended = [], []
        for run in list(self._open.values()):
            if self._builder.last_ns < run.first_token_ns <= now:
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
        before = self._progress.get(worker.name, _Progress())
        running, waiting, usage = sim.load(now)
        (steps, busy_ns), meter = sim.progress(), sim.meter
        self._progress[worker.name] = _Progress(
            steps, busy_ns, meter.prefill_ns, meter.prefill_tokens
        )
        new_steps, new_busy_ns = steps - before.steps, busy_ns - before.busy_ns
        decoded = worker.info.role is not Role.PREFILL and new_steps > 0
        prompts = max(0, meter.prefill_tokens - before.prefill_tokens)
        seconds = max(now - self._builder.last_ns, 1) / SECOND
        experts = getattr(worker.spec.timing, "experts", None)
        if experts is not None:
            tokens = prompts / max(new_steps, 1) + (running if decoded else 0)
            experts = experts.window(tokens, new_steps, seconds)
        # After a restart counters begin anew, and nothing of the window is known.
        return self._builder.worker(
            life, worker.info, self._plane, row,
            prompts,
            waiting=waiting,
            running=running,
            kv_usage=usage,
            cached_tokens=float(sim.core.cached_blocks * worker.info.block_size),
            prefill_s=max(0, meter.prefill_ns - before.prefill_ns) / SECOND,
            itl_s=new_busy_ns / new_steps / SECOND if decoded else None,
            cpu_usage=max(0, new_busy_ns) / max(now - self._builder.last_ns, 1),
            experts=experts,
        )  # fmt: skip
