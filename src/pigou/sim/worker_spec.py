"""A worker of a simulated fleet: hardware, limits and liveness."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from pigou.config import ConfigError, EngineConfig
from pigou.kv.offload import RecomputeCost
from pigou.kv.resharding import TransferSplit, heads_of_rank, split_of
from pigou.kv.tiers import Tiers
from pigou.request import KVEvent, Rehearsed, Role, Worker
from pigou.sim.drafts import DraftConfig
from pigou.sim.fleet_config import FleetConfig, WorkerGroup
from pigou.sim.setup import TierConfig
from pigou.sim.tiers import simulated_tiers
from pigou.sim.timing import Timing
from pigou.sim.virtual_clock import EPOCH
from pigou.sim.worker import SimWorker
from pigou.windows.planner_window import WorkerState


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Worker spec of a group."""

    group: WorkerGroup  # group in the fleet's configuration
    engine: EngineConfig  # engine limits
    timing: Timing
    kv_bytes: int  # KV bytes per token
    ahead: bool = False  # whether a step is planned when the one before begins
    tiers: tuple[TierConfig, ...] = ()  # beyond the device
    # seconds to compute a block.
    recompute_cost: RecomputeCost = field(default_factory=RecomputeCost)
    recall: bool = True  # whether blocks are brought back before a session is expected
    layout: str = ""  # KV layout for remote reads; "" for none
    rehearsed: tuple[Rehearsed, ...] = ()  # speeds measured before it is ready
    gpus: int = 1
    kv_heads: int = 0  # KV heads of its model; 0 if unknown
    drafts: DraftConfig | None = None  # speculation
    dp: int = 1  # ranks with KV of their own, among `gpus`

    def make_tiers(self) -> Tiers | None:
        """Return a worker's empty tiers, or None."""
        if not self.tiers:
            return None
        engine = self.engine
        size = self.kv_bytes * engine.block_size
        made = simulated_tiers(self.tiers, size, engine.blocks, self.recompute_cost)
        made.recall = self.recall
        return made


@dataclass(slots=True, eq=False)
class FleetWorker:
    """One worker over its lives: after each death it starts again with an empty cache."""

    number: int  # index in the fleet
    info: Worker
    spec: WorkerSpec
    sim: SimWorker | None = None  # the live worker; None while it is dead
    registered: bool = False  # whether the control plane counts it as alive
    missed_events: list[KVEvent] = field(default_factory=list)  # lost since the last arrived
    past_totals: tuple[int, int, int, int] = (0, 0, 0, 0)  # `totals` before restarts
    past_restored: tuple[int, ...] = ()  # `restored` before restarts
    held_ids: set[str] = field(default_factory=set)  # ids under which it holds blocks for others
    pool: str = ""  # name of its pool
    state: WorkerState | None = WorkerState.STARTING  # lifecycle state; None once gone for good
    since_ns: int = EPOCH  # when that state began
    # nanoseconds of its GPUs by role and state, added up over them.
    gpu_ns: Counter[tuple[Role, WorkerState]] = field(default_factory=Counter)
    failed_starts: int = 0  # in a row
    epoch: int = 0  # count of role changes

    def enter(self, state: WorkerState | None, now: int) -> None:
        """Account the present state's time, and enter another."""
        self.gpu_ns = self.gpu_ns_until(now)
        self.state, self.since_ns = state, now

    def gpu_ns_until(self, now: int) -> Counter[tuple[Role, WorkerState]]:
        """Return `gpu_ns` with the time of its state until now."""
        times = self.gpu_ns.copy()
        if self.state is not None:
            times[self.info.role, self.state] += (now - self.since_ns) * self.spec.gpus
        return times

    @property
    def name(self) -> str:
        """Worker id."""
        return self.info.id

    @property
    def totals(self) -> tuple[int, int, int, int]:
        """Steps, busy nanoseconds, prefix cache queries and hits (tokens) of all lives."""
        if self.sim is None:
            return self.past_totals
        core = self.sim.core
        life = (self.sim.steps, self.sim.busy_ns, core.stats.queried_tokens, core.stats.hit_tokens)
        steps, busy_ns, queries, hits = (a + b for a, b in zip(self.past_totals, life, strict=True))
        return steps, busy_ns, queries, hits

    @property
    def restored(self) -> tuple[int, ...]:
        """Blocks restored from each tier in all lives."""
        tiers = self.sim.core.tiers if self.sim is not None else None
        life = [counts.restored for counts in tiers.counts] if tiers is not None else []
        both = zip_longest(self.past_restored, life, fillvalue=0)
        return tuple(before + own for before, own in both)


def rank_splits(
    config: FleetConfig, specs: Sequence[WorkerSpec], workers: Sequence[FleetWorker]
) -> Callable[[int, int], TransferSplit] | None:
    """Return how transfers between two workers are split over their ranks."""
    if config.link.per == "worker":
        return None
    for group, spec in zip(config.workers, specs, strict=True):
        if not spec.kv_heads:
            raise ConfigError("fleet: link is per gpu, and no model is given; also give --model")
        try:
            heads_of_rank(spec.kv_heads, spec.gpus // spec.dp, 0)
        except ValueError as error:
            raise ConfigError(f"fleet: {group.role.value}: {error}") from error

    def split(source: int, target: int) -> TransferSplit:
        sender, receiver = workers[source].spec, workers[target].spec
        made = split_of(sender.kv_heads, sender.gpus // sender.dp, receiver.gpus // receiver.dp)
        if sender.dp == receiver.dp == 1:
            return made
        return replace(  # other transfers take the other ranks' links
            made, source_share=made.source_share / sender.dp,
            target_share=made.target_share / receiver.dp,
        )  # fmt: skip

    return split
