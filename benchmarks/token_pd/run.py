"""One run of `benchmarks.token_pd.tables`: requests through a LocalEngine, and what came of them.

Time is the steps' own: a clock that stands still between steps and jumps to the next arrival when
nobody is served. On a CPU it counts this process's CPU time (one thread), so that other work on
the machine counts for nobody; on a GPU it is the wall clock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
from numpy.typing import NDArray

from benchmarks.token_eviction.forced import Forcing, Script, force
from benchmarks.token_pd.load import Arrival, Item
from pigou.config import EngineConfig, EvictionConfig
from pigou.engine.plan import Plan
from pigou.request import SECOND, SamplingParams
from pigou.runtime.local_engine import LocalEngine, Output
from pigou.runtime.models.load import LoadedModel
from pigou.runtime.token_eviction.policy import CacheEntries, Returns

#: Tokens of a block that budgets are told in.
BLOCK = 16
#: Entries that every request keeps, under every policy: three blocks.
LEAST = 48
CONSTANT = "constant"
#: Most tokens of a request.
LONGEST = 2048
#: Called after each step with the engine and the plan: the regret's recorder, integrity checks.
Watch = Callable[[LocalEngine, Plan], None]


@dataclass(frozen=True)
class Setting:
    """What a run is made with."""

    policy: str  # name of the token eviction; "none" for none (requests wait and are preempted)
    streams: int  # most requests that run at once
    blocks: (
        int  # budget in blocks of `BLOCK` tokens; the device gets blocks of `block` for its bytes
    )
    # parameters of the policy; `constant`, which none has, puts this number in the place of what
    # its predictor says of any entry.
    params: dict[str, float] = field(default_factory=dict)
    block: int = BLOCK  # tokens of a block of the device

    def engine(self) -> EngineConfig:
        """Return the engine's configuration."""
        eviction = None
        if self.policy != "none":
            params = {name: value for name, value in self.params.items() if name != CONSTANT}
            eviction = EvictionConfig(policy=self.policy, params=params, least=LEAST)
        return EngineConfig(
            blocks=self.blocks * BLOCK // self.block, block_size=self.block,
            max_seqs=self.streams, max_model_len=LONGEST,
            max_batched_tokens=512 + self.streams, prefix_caching=False, eviction=eviction,
        )  # fmt: skip


@dataclass
class Served:
    """A request on its way through the engine; times in nanoseconds."""

    arrival: Arrival
    output: Output
    script: Script
    done: int = -1


@dataclass
class Figures:
    """What a run showed."""

    policy: str
    streams: int  # most at once
    blocks: int
    requests: int
    perplexity: float  # a forced token of the tenants who read text
    exact: float  # share of recall items answered
    peak_bytes: int  # most bytes of blocks in use during any step, side data included
    mean_bytes: float  # the same, a mean over time
    span: float  # seconds from the first arrival to the last finish
    busy: float  # share of the time until the last arrival in which steps ran
    steps: int
    rate: float  # finished requests per second of the span
    capacity: float  # finished requests per second in which steps ran
    p50: float  # median seconds from arrival to finish
    p95: float  # 95th percentile of the same
    at_once: float  # mean requests in the batch, over time
    most: int
    # share of the busy time in which somebody waited, or did without entries it gave up.
    short: float
    preemptions: int  # requests that lost their row
    dropped: int  # cache entries given up, counted in one layer and head

    def row(self) -> dict[str, float | str]:
        """Return all figures by name."""
        return asdict(self)


class Run:
    """Drives an engine through arrivals."""

    def __init__(self, model: LoadedModel, setting: Setting, watch: Watch | None = None) -> None:
        self.setting = setting
        self.engine = LocalEngine(model, setting.engine())
        if CONSTANT in setting.params:
            _flatten(self.engine, setting.params[CONSTANT])
        self.clock = _clock(model)
        self.forcing: Forcing = force(self.engine.executor, self.clock)
        self.watch = watch
        self.engine.on_plan = self._on_plan
        self.now = 0
        self.busy = 0
        self.steps = 0
        self.plan: Plan | None = None
        self.done: list[Served] = []
        self._coming = (0, 1)  # busy time, and time, at the last arrival (or the first step's end)
        self._block_bytes = block_bytes(self.engine)
        self._peak = self._dropped = self._most = 0
        self._weighted = self._crowd = self._short = 0.0
        self._used = 0

    def __call__(self, arrivals: list[Arrival]) -> tuple[Figures, list[Served]]:
        """Serve all arrivals, which are in order of time."""
        for _ in self.steps_of(arrivals):
            pass
        return self.figures(), self.done

    def steps_of(self, arrivals: list[Arrival]) -> Iterator[None]:
        """Serve all arrivals, a step at a time."""
        coming, running = arrivals[::-1], list[Served]()
        while coming or running:
            while coming and coming[-1].time <= self.now:
                running.append(self.offer(coming.pop()))
            if not coming and not self._coming[0]:
                self._coming = (self.busy, max(self.now, 1))
            if not running:
                self.now = coming[-1].time
                continue
            self.step()
            running, ended = _split(running)
            for served in ended:
                served.done = self.now
                self.forcing.forget(served.output.request)
            self.done += ended
            yield

    def offer(self, arrival: Arrival) -> Served:
        """Let a request wait."""
        item = arrival.item
        params = SamplingParams(max_tokens=item.generated, temperature=0.0, ignore_eos=True)
        output = self.engine.add(item.prompt, params, tenant=item.tenant)
        return Served(arrival, output, self.forcing.expect(output.request, item.forced))

    def step(self) -> None:
        """Do one step of the engine, and let the clock go on by what it took."""
        forced, began = self.forcing.spent, self.clock()
        self.engine.step()
        spent = self.clock() - began - (self.forcing.spent - forced)
        self.now += spent
        self.busy += spent
        self.steps += 1
        core = self.engine.core
        self._weighted += spent * self._used
        self._crowd += spent * core.computing
        self._most = max(self._most, core.computing)
        self._short += spent * (core.waiting > 0 or core.missing_entries > 0)
        if self.watch is not None and self.plan is not None:
            self.watch(self.engine, self.plan)

    def _on_plan(self, plan: Plan) -> None:
        """Look at the pool while the plan's blocks are taken."""
        self.plan = plan
        core = self.engine.core
        self._used = (core.config.blocks - core.free_blocks) * self._block_bytes
        self._peak = max(self._peak, self._used)
        self._dropped += sum(each.drop for each in plan.compactions)

    def figures(self) -> Figures:
        """Return what the run showed, once all were served."""
        done, (busy, last) = self.done, self._coming
        latencies = np.array([served.done - served.arrival.time for served in done]) / SECOND
        p50, p95 = np.quantile(latencies, (0.5, 0.95)).tolist()
        return Figures(
            policy=self.setting.policy, streams=self.setting.streams, blocks=self.setting.blocks,
            requests=len(done), perplexity=perplexity(done), exact=exact(done),
            peak_bytes=self._peak, mean_bytes=self._weighted / self.busy,
            span=self.now / SECOND, busy=busy / last, steps=self.steps,
            rate=len(done) * SECOND / self.now, capacity=len(done) * SECOND / self.busy,
            p50=p50, p95=p95, at_once=self._crowd / self.busy, most=self._most,
            short=self._short / self.busy, preemptions=self.engine.core.stats.preemptions,
            dropped=self._dropped,
        )  # fmt: skip


def block_bytes(engine: LocalEngine) -> int:
    """Return the bytes of a device block, the policy's side data included."""
    evictor = engine.executor.evictor
    side = 0 if evictor is None else evictor.stats.block_bytes
    return int(engine.cache.layout.block_bytes) + int(side)


def blocks_for(model: LoadedModel, policy: str, blocks: int) -> int:
    """Return the blocks that a policy has for the bytes of `blocks` blocks of keys and values."""
    engine = LocalEngine(model, Setting(policy, 1, 64).engine())
    return blocks * int(engine.cache.layout.block_bytes) // block_bytes(engine)


def perplexity(done: list[Served]) -> float:
    """Return the perplexity of a forced token, over the requests that read text."""
    each = logprobs(done)
    return math.exp(-float(each.mean())) if len(each) else float("nan")


def logprobs(done: list[Served]) -> NDArray[np.float64]:
    """Return the log probabilities of the forced tokens of text, in the requests' order."""
    parts = [s.script.logprobs for s in sorted(done, key=_number) if s.arrival.item.answer < 0]
    return np.concatenate([np.empty(0), *parts])


def exact(done: list[Served]) -> float:
    """Return the share of recall items whose token after the question is the answer."""
    asked = [served for served in done if served.arrival.item.answer >= 0]
    right = [served.output.tokens[-1] == served.arrival.item.answer for served in asked]
    return float(np.mean(right)) if asked else float("nan")


def serve(
    model: LoadedModel,
    setting: Setting,
    arrivals: list[Arrival],
    watch: Watch | None = None,
) -> Figures:
    """Run a setting and return its figures."""
    return Run(model, setting, watch)(arrivals)[0]


def serve_in_turns(
    model: LoadedModel, settings: Sequence[Setting], coming: list[Arrival]
) -> list[Figures]:
    """Run settings side by side, each on its own clock: who is furthest behind does a step.

    What slows the machine for a while then slows all of them, at the same time of theirs.
    """
    runs = [Run(model, setting) for setting in settings]
    steps = [run.steps_of(coming) for run in runs]
    left = list(range(len(runs)))
    while left:
        behind = min(left, key=lambda i: runs[i].now)
        if next(steps[behind], Served) is Served:
            left.remove(behind)
    return [run.figures() for run in runs]


def plenty(items: list[Item], streams: int) -> int:
    """Return blocks with which nothing ever runs short."""
    lengths = sorted((len(item.prompt) + item.generated for item in items), reverse=True)
    return sum(-(-length // BLOCK) + 2 for length in lengths[:streams])


def _flatten(engine: LocalEngine, value: float) -> None:
    """Let the policy say the same of every entry."""
    evictor = engine.executor.evictor
    assert evictor is not None, "a predictor is replaced where there is a policy"
    kind = evictor.policy.scores

    def scores(rows: Sequence[CacheEntries]) -> list[Returns]:
        return [np.full_like(each, value) for each in kind(rows)]

    evictor.policy.scores = scores  # type: ignore[method-assign]
    evictor.policy.compiled = False  # judged by `scores`


def _number(served: Served) -> int:
    return int(served.output.request.rpartition("-")[2])


def _split(running: list[Served]) -> tuple[list[Served], list[Served]]:
    """Separate who runs from who ended."""
    ended = [served for served in running if served.output.reason is not None]
    return ([s for s in running if s.output.reason is None] if ended else running), ended


def _clock(model: LoadedModel) -> Callable[[], int]:
    return time.process_time_ns if model.device.type == "cpu" else time.monotonic_ns
