"""A worker of a simulated fleet: what it is made of, and whether it is alive."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from pigou.config import EngineConfig
from pigou.engine.startup_profiling import (
    CONTEXT_TOKENS,
    DECODE_STEPS,
    ProfiledLoad,
    profiled_loads,
)
from pigou.events import KVEvent
from pigou.kv.offload import RecomputeCost
from pigou.kv.tiers import Tiers
from pigou.request import SECOND, Rehearsed, Worker
from pigou.sim.fleet_config import Members
from pigou.sim.setup import TierConfig
from pigou.sim.tiers import build_tiers
from pigou.sim.timing import Batch, Timing
from pigou.sim.worker import SimWorker


@dataclass(frozen=True, slots=True)
class Plant:
    """What workers of one kind run on.

    Attributes:
        kind: what the fleet's configuration says of them.
        engine: limits of their cores.
        timing: of their steps.
        kv_bytes: of one token's KV.
        tiers: beyond the device.
        worth: what computing a block takes.
        recall: whether blocks are brought back before a session is expected.
        ahead: whether steps are decided when the one before begins.
        layout: of its cache, for others that may read it; "" for none.
        rehearsed: what it measures before it is ready.
    """

    kind: Members
    engine: EngineConfig
    timing: Timing
    kv_bytes: int
    ahead: bool = False
    tiers: tuple[TierConfig, ...] = ()
    worth: RecomputeCost = field(default_factory=RecomputeCost)
    recall: bool = True
    layout: str = ""
    rehearsed: tuple[Rehearsed, ...] = ()

    def make_tiers(self) -> Tiers | None:
        """Return new, empty tiers of one worker; None where it has none."""
        if not self.tiers:
            return None
        engine = self.engine
        size = self.kv_bytes * engine.block_size
        made = build_tiers(self.tiers, size, engine.blocks, self.worth)
        made.recall = self.recall
        return made


@dataclass(slots=True, eq=False)
class Member:
    """One worker.

    Attributes:
        number: its place in the fleet.
        worker: as the control plane knows it.
        plant: what it runs on.
        sim: what computes; None while it is dead. A new one after each death.
        known: whether the control plane takes it for alive.
        missed: KV events that were lost since the last that arrived.
        told: its last load report.
        past: computing of its earlier lives: (steps, nanoseconds, tokens asked of the prefix
            cache, of those found).
        holding: ids under which it keeps blocks for others.
    """

    number: int
    worker: Worker
    plant: Plant
    sim: SimWorker | None = None
    known: bool = False
    missed: list[KVEvent] = field(default_factory=list)
    told: tuple[int, int, float] = (0, 0, 0.0)
    past: tuple[int, int, int, int] = (0, 0, 0, 0)
    holding: set[str] = field(default_factory=set)

    @property
    def name(self) -> str:
        """Its id."""
        return self.worker.id

    @property
    def figures(self) -> tuple[int, int, int, int]:
        """Steps, nanoseconds busy, tokens asked of the prefix cache, and found, in all."""
        if self.sim is None:
            return self.past
        core = self.sim.core
        now = (self.sim.steps, self.sim.busy, core.prefix_queries, core.prefix_hits)
        steps, busy, queries, hits = (a + b for a, b in zip(self.past, now, strict=True))
        return steps, busy, queries, hits


def rehearse(timing: Timing, config: EngineConfig) -> tuple[Rehearsed, ...]:
    """Return what the steps of each scene take, by the worker's timing."""
    return tuple(_measure(scene, timing, config) for scene in profiled_loads(config))


def _measure(scene: ProfiledLoad, timing: Timing, config: EngineConfig) -> Rehearsed:
    done, steps, nanos = 0, 0, 0
    least = 1 if scene.tokens else DECODE_STEPS
    while done < scene.tokens or steps < least:
        chunk = min(scene.tokens - done, config.max_batched_tokens - scene.streams)
        nanos += _step(timing, chunk, done, done + chunk == scene.tokens, scene.streams, steps)
        done, steps = done + chunk, steps + 1
    return Rehearsed(scene.tokens, scene.streams, steps, nanos / SECOND)


def _step(timing: Timing, chunk: int, done: int, last: bool, streams: int, age: int) -> int:
    """Return the nanoseconds of a step: some streams, and a chunk of a prompt if there is any."""
    prompt = int(chunk > 0)
    counts, kv_lens = (
        np.ones(streams + prompt, np.int32),
        np.full(streams + prompt, CONTEXT_TOKENS + age, np.int32),
    )
    samples = np.ones(streams + prompt, np.bool_)
    if prompt:
        counts[-1], kv_lens[-1], samples[-1] = chunk, done, last
    return int(timing.durations(Batch(counts, kv_lens, samples), 1)[0])
