"""Windows of a simulated fleet, as `pigou diagnose` reads them."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pigou.request import SECOND
from pigou.sim.request_run import RequestRun, RunOutcome
from pigou.sim.simulation import Simulation
from pigou.sim.streams import ITLHistogram
from pigou.sim.timing import Timing, step_nanos
from pigou.sim.virtual_clock import EPOCH, Phase
from pigou.sim.window_meter import generated_tokens
from pigou.sim.worker import SimWorker
from pigou.sim.worker_spec import FleetWorker
from pigou.windows.builder import ObservationBuilder
from pigou.windows.observations import FleetObservation, WorkerObservation

#: Key of the samples among the last events of a moment.
_LAST = 2**50 + 1
#: An hour of windows at most, and fewer where many workers make them large.
_WINDOWS, _MIN_WINDOWS, _ROWS = 360, 60, 12_000
#: Running requests up to which the knee of a worker is looked for.
_MAX_KNEE = 4096
_PERCENTILES = np.array([50.0, 99.0])


@dataclass(slots=True)
class _WorkerSums:
    sim: SimWorker | None = None
    samples: int = 0
    running: float = 0.0
    waiting: float = 0.0
    usage: float = 0.0
    wasted: float = 0.0
    idle_blocks: float = 0.0
    tokens: float = 0.0
    restarts: int = 0
    output_tokens: int = 0
    before: Counter[str] = field(default_factory=Counter)


class WindowObserver:
    """Observes a simulation without changing it: samples every second, a window every ten."""

    def __init__(self, simulation: Simulation, *, window_s: int = 10) -> None:
        """Observe a simulation that has not run yet, in windows of `window_s` seconds."""
        self._simulation, self._window_s = simulation, window_s
        rows = _ROWS // max(1, len(simulation.fleet.workers))
        size = max(_MIN_WINDOWS, min(_WINDOWS, rows))
        self.windows: deque[FleetObservation] = deque(maxlen=size)
        self._made = ObservationBuilder()
        self._made.weights = simulation.fleet.plane.config.tenant_weights
        self._second, self._known, self._shed = 0, 0, 0
        self._open: dict[int, RequestRun] = {}
        self._attempts: dict[int, int] = {}
        self._tokens: dict[int, int] = {}
        self._began: dict[int, int] = {}
        self._workers: defaultdict[str, _WorkerSums] = defaultdict(_WorkerSums)
        self._itl: NDArray[np.int64] = simulation.fleet.itl.histogram.copy()
        self._knees: dict[tuple[int, int], float | None] = {}
        self._begin_window()
        simulation.clock.at(EPOCH + SECOND, Phase.PLAN, _LAST, self._sample)

    def _begin_window(self) -> None:
        self._queued = 0.0
        self._kv: Counter[str] = Counter()
        self._waiting: Counter[str] = Counter()

    def _sample(self, now: int) -> None:
        simulation = self._simulation
        fleet = simulation.fleet
        self._second += 1
        self._queued += sum(len(plane.queue) for plane in fleet.planes)
        runs = simulation.client.runs
        for run in runs[self._known :]:
            self._open[run.number] = run
            self._made.lengths.add(run.spec.prompt_tokens)
        self._known = len(runs)
        wasted: Counter[str] = Counter()
        entries: Counter[str] = Counter()
        for run in self._open.values():
            self._sample_run(run, wasted, entries)
        for worker in fleet.workers:
            self._sample_worker(worker, now, wasted[worker.name], entries[worker.name])
        if self._second % self._window_s == 0:
            self.windows.append(self._window(now))
            self._begin_window()
        simulation.clock.at(now + SECOND, Phase.PLAN, _LAST, self._sample)

    def _sample_run(self, run: RequestRun, wasted: Counter[str], entries: Counter[str]) -> None:
        spec, tenant = run.spec, run.spec.tenant
        if not run.sent_ns or run.outcome is not RunOutcome.PENDING:
            return
        if run.began_ns < run.sent_ns:
            self._waiting[tenant] += 1
            return
        generated = generated_tokens(self._simulation.fleet.plane, run)
        tokens = spec.prompt_tokens + generated
        self._kv[tenant] += tokens
        self._count_tokens(run, generated)
        worker = run.decode_worker or run.prefill_worker
        size = self._simulation.fleet.workers[0].spec.engine.block_size
        wasted[worker] += -tokens % size
        entries[worker] += tokens

    def _count_tokens(self, run: RequestRun, generated: int) -> None:
        new = max(0, generated - self._tokens.get(run.number, 0))
        self._made.tokens[run.spec.tenant] += new
        self._workers[run.decode_worker].output_tokens += new
        self._tokens[run.number] = generated

    def _sample_worker(self, worker: FleetWorker, now: int, wasted: int, entries: int) -> None:
        sums, sim = self._workers[worker.name], worker.sim
        if sim is not sums.sim:
            if sums.sim is not None:
                sums.restarts += 1
            sums.sim, sums.before = sim, Counter()
        if sim is None:
            return
        running, waiting, usage = sim.load(now)
        sums.samples += 1
        sums.running += running
        sums.waiting += waiting
        sums.usage += usage
        sums.wasted += wasted
        sums.idle_blocks += sum(len(p.blocks) for p in sim.core.pinned if p.is_idle(now))
        sums.tokens += entries

    # --- windows ------------------------------------------------------------------------------

    def _window(self, now: int) -> FleetObservation:
        simulation, made, seconds = self._simulation, self._made, self._window_s
        fleet, begin = simulation.fleet, now - seconds * SECOND
        ended = [run for run in self._open.values() if not simulation.client.is_open(run)]
        self._count_attempts()
        first, began = self._progressed(begin, now)
        made.counts["refused"], self._shed = (
            fleet.dispatcher.shed - self._shed,
            fleet.dispatcher.shed,
        )
        for run in began:
            made.tokens[run.spec.tenant] += run.spec.prompt_tokens
            made.wait_s.append((run.spec.prompt_tokens, (run.began_ns - run.sent_ns) / SECOND))
        made.ttft_s += [(run.first_token_ns - run.sent_ns) / SECOND for run in first]
        late = [(run.spec.prompt_tokens, (now - run.sent_ns) / SECOND)
                for run in self._open.values()
                if run.sent_ns > 0 and run.began_ns < run.sent_ns
                and run.outcome is RunOutcome.PENDING]  # fmt: skip
        computed = [run.spec.prompt_tokens for run in self._open.values()
                    if run.began_ns >= run.sent_ns
                    and not run.sent_ns <= run.first_token_ns <= begin]  # fmt: skip
        itl_p50, itl_p99 = self._gaps()
        for run in ended:
            self._count_tokens(run, run.output_tokens)
            del self._open[run.number]
            for seen in (self._attempts, self._tokens, self._began):
                seen.pop(run.number, None)
        outcomes = Counter(run.outcome for run in ended)
        made.counts.update(completed=outcomes[RunOutcome.DONE], failed=outcomes[RunOutcome.FAILED])
        return made.window(
            (begin - EPOCH) / SECOND, float(seconds), late, computed,
            {name: count / seconds for name, count in self._waiting.items()}, self._kv,
            queued=self._queued / seconds, itl_p50_s=itl_p50, itl_p99_s=itl_p99,
            workers=tuple(self._worker(worker) for worker in fleet.workers),
        )  # fmt: skip

    def _count_attempts(self) -> None:
        for number, run in self._open.items():
            before = self._attempts.get(number, 0)
            new = run.attempts - before
            self._made.counts.update(arrived=new, repeated=new - (before == 0 and new > 0))
            self._attempts[number] = run.attempts

    def _progressed(self, begin: int, now: int) -> tuple[list[RequestRun], list[RequestRun]]:
        """Return requests with their first token in the window, and requests that began in it."""
        first = [r for r in self._open.values() if begin < r.first_token_ns <= now]
        began = [r for r in self._open.values()
                 if r.began_ns >= r.sent_ns
                 and self._began.get(r.number, 0) < r.began_ns <= now]  # fmt: skip
        for run in began:
            self._began[run.number] = run.began_ns
        return first, began

    def _gaps(self) -> tuple[float | None, float | None]:
        histogram = self._simulation.fleet.itl.histogram
        gaps = ITLHistogram()
        gaps.histogram = histogram - self._itl
        gaps.sums[0] = gaps.histogram.sum()
        self._itl = histogram.copy()
        if not gaps.count:
            return None, None
        p50, p99 = gaps.percentiles(_PERCENTILES).tolist()
        return p50, p99

    def _worker(self, worker: FleetWorker) -> WorkerObservation:
        sums, sim = self._workers[worker.name], worker.sim
        name, role, n = worker.name, worker.info.role.value, max(sums.samples, 1)
        restarts, output_tokens = sums.restarts, sums.output_tokens
        if sim is None:
            self._workers[name] = _WorkerSums(before=sums.before)
            return WorkerObservation(
                worker=name, role=role, restarts=restarts, output_tokens=output_tokens
            )
        engine, meter = worker.spec.engine, sim.meter
        _, busy_ns = sim.progress()
        stats = sim.core.stats
        totals = Counter(
            busy=busy_ns, preemptions=stats.preemptions, queried=stats.queried_tokens,
            hits=stats.hit_tokens, steps=meter.prefill_steps, ns=meter.prefill_ns,
            tokens=meter.prefill_tokens,
        )  # fmt: skip
        new = Counter({key: value - sums.before[key] for key, value in totals.items()})
        token_ns = meter.prefill_ns / meter.prefill_tokens if meter.prefill_tokens else 0.0
        restores, slow, link_busy = self._restores(sim, token_ns, totals, sums.before)
        mean = sums.tokens / sums.running if sums.running else 0.0
        self._workers[name] = _WorkerSums(sim=sim, before=totals)
        return WorkerObservation(
            worker=name, role=role, restarts=restarts,
            running=sums.running / n, waiting=sums.waiting / n,
            knee=self._knee(worker, mean), busy=new["busy"] / SECOND / self._window_s,
            kv_tokens=engine.blocks * engine.block_size, kv_usage=sums.usage / n,
            wasted_tokens=sums.wasted / n,
            idle_tokens=sums.idle_blocks * engine.block_size / n, preemptions=new["preemptions"],
            queried_tokens=new["queried"], hit_tokens=new["hits"], prefill_tokens=new["tokens"],
            prefill_steps=new["steps"], prefill_s=new["ns"] / SECOND, output_tokens=output_tokens,
            decode_stall_s=meter.take_stall() / SECOND, restores=restores, slow_restores=slow,
            link_busy=link_busy,
        )  # fmt: skip

    def _restores(
        self, sim: SimWorker, token_ns: float, totals: Counter[str], before: Counter[str]
    ) -> tuple[int, int | None, float | None]:
        """Return reads from tiers, the slower ones, and the share that the busiest link worked."""
        links = sim.links
        if links is None:
            return 0, None, None
        reads = list(links.reads)
        links.reads.clear()
        shares = []
        for tier, up_ns in enumerate(links.up_ns):
            totals[f"up{tier}"] = up_ns
            shares.append((up_ns - before[f"up{tier}"]) / SECOND / self._window_s)
        slow = sum(ns > tokens * token_ns for tokens, ns in reads) if token_ns else 0
        return len(reads), slow, min(1.0, max(shares, default=0.0))

    def _knee(self, worker: FleetWorker, mean: float) -> float | None:
        """Return the batch at which a decode step takes twice as long as alone."""
        if mean < 1.0:
            return None
        depth = 1 << (round(mean).bit_length() - 1)
        key = (id(worker.spec.timing), depth)
        if key not in self._knees:
            self._knees[key] = knee_of(worker.spec.timing, depth)
        return self._knees[key]


def knee_of(timing: Timing, depth: int) -> float | None:
    """Return the batch whose decode step takes twice as long as one stream's; None up to 4,096."""

    def step_ns(batch: int) -> int:
        return step_nanos(timing, 0, 0, False, batch, depth)

    low, high, single_ns = 1, 2, step_ns(1)
    while step_ns(high) < 2 * single_ns:
        low, high = high, 2 * high
        if high > _MAX_KNEE:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if step_ns(middle) < 2 * single_ns else (low, middle)
    return float(high)
