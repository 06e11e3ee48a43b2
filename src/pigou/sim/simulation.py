"""Puts a simulation together, and runs it."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from pigou.config import ConfigError, ControlConfig, EngineConfig
from pigou.control import prefix_index
from pigou.control.routing.policy import RoutingPolicy
from pigou.engine import startup_profiling
from pigou.sim.client import Client, ClientConfig
from pigou.sim.fleet import Fleet
from pigou.sim.fleet_config import FleetConfig, Members
from pigou.sim.result import Result
from pigou.sim.setup import Setup
from pigou.sim.tiers import worth_of
from pigou.sim.timing import Timing
from pigou.sim.timing_models import build_timing, capacity, kv_bytes
from pigou.sim.virtual_clock import EPOCH, Clock
from pigou.sim.worker import MOST_STEPS
from pigou.sim.worker_spec import Member, Plant, rehearse
from pigou.sim.workload import ClosedLoop, Lengths, OpenLoop, renewal

#: Events between two looks at the progress.
_LOOK = 4096
#: Objects made between two looks for cycles of garbage: a run leaves next to none.
_GARBAGE = 50_000
#: For limits of the control plane that are not to matter. The gateway holds requests back that its
#: workers have no room for; a simulation of the workers alone lets them queue there.
UNLIMITED = 2**60


class Simulation:
    """A client, and the fleet that serves it.

    Attributes:
        fleet: that serves.
        client: that sends.
        clock: of both.
    """

    def __init__(
        self, workload: OpenLoop | ClosedLoop, fleet: FleetConfig, setup: Setup,
        control: ControlConfig, client: ClientConfig, *, seed: int = 0,
        policy: RoutingPolicy | None = None, stepwise: bool = False, assess_every: float = 60.0,
    ) -> None:  # fmt: skip
        """Put it together.

        Args:
            workload: what is asked for.
            fleet: who serves.
            setup: what the workers run on.
            control: of the control plane; its seed counts, not `seed`.
            client: how the workload is sent.
            seed: of client and network.
            policy: used instead of the one that `control` names.
            stepwise: plan one step at a time; the results are the same, and take longer.
            assess_every: seconds between two computations of the Price of Anarchy.

        Raises:
            ConfigError: something of it cannot be had.
        """
        self.clock = Clock()
        if control.queue_timeout >= UNLIMITED and not client.timeout:
            _check_end(fleet)
        plants, overhead = _plants(fleet, setup, workload.longest)
        if fleet.overhead_ms is None:
            fleet = msgspec.structs.replace(fleet, overhead_ms=overhead * 1000)
        self.fleet = Fleet(
            fleet, plants, control, self.clock, policy=policy, seed=seed, stepwise=stepwise,
            assess_every=assess_every,
        )  # fmt: skip
        self.client = Client(workload, client, self.fleet.dispatcher, self.clock, seed)

    def run(self, watch: Callable[[Simulation], None] | None = None) -> Result:
        """Run until the client is done; `watch` is called now and then."""
        began = time.perf_counter()
        before = gc.get_threshold()
        gc.set_threshold(_GARBAGE, *before[1:])
        try:
            self._run(watch)
        finally:
            gc.set_threshold(*before)
        clock, client, fleet = self.clock, self.client, self.fleet
        fleet.close()
        lending = fleet.dispatcher.lending
        wall = time.perf_counter() - began
        return Result(
            calls=client.calls,
            gaps=fleet.gaps,
            begin=EPOCH,
            end=clock.now,
            wall=wall,
            assessments=fleet.assessments,
            placements=fleet.placements,
            caching=fleet.plane.cache_monitor.summary(fleet.plane.index),
            workers=_figures(fleet.members, clock.now - EPOCH),
            shed=fleet.dispatcher.shed,
            transfers=(fleet.network.transfers, fleet.network.bytes),
            reads=(lending.count, lending.tokens, lending.failed),
        )

    def _run(self, watch: Callable[[Simulation], None] | None) -> None:
        over = self.client.done
        while not over:
            over = self.clock.run(self.client, _LOOK)
            if watch is not None:
                watch(self)


def _check_end(fleet: FleetConfig) -> None:
    """Refuse a fleet of which in the end nobody is left, where requests wait without end."""
    if all(
        any(each.end == math.inf for each in kind.fails)
        for kind in fleet.workers
        if kind.role.decodes
    ):
        raise ConfigError(
            "fleet: every worker that decodes fails for good, and requests would wait for ever; "
            "give one of them no fails without end, or give --queue-timeout, or the workload "
            "timeout=SECONDS"
        )


def _plants(fleet: FleetConfig, setup: Setup, longest: int) -> tuple[list[Plant], float]:
    """Return what the kinds of workers run on, and the seconds from the client to a worker."""
    plants, overhead, vllm = [], 0.0, setup.engine == "vllm"
    for kind in fleet.workers:
        gpu, tp = kind.gpu or setup.gpu, kind.tp or setup.tp
        built = build_timing(kind.timing or setup.timing, setup.model, gpu, tp)
        overhead = max(overhead, built.overhead)
        limits: dict[str, Any] = {
            "block_size": kind.block_size,
            "max_seqs": kind.max_seqs or setup.max_seqs,
            "max_batched_tokens": kind.max_batched_tokens or setup.max_batched_tokens,
        }
        blocks = kind.blocks or setup.blocks or capacity(built, setup.model, gpu, tp, **limits)
        # What is longer than all blocks is refused anyway, and needs no room in the tables.
        room = blocks * kind.block_size + 1
        engine = EngineConfig(
            blocks=blocks,
            max_model_len=min(setup.max_model_len or longest, room),
            prefix_caching=kind.prefix_caching,
            order="fcfs" if vllm else "priority",  # as either is by default
            headroom=0 if vllm else 1,
            max_repeat=MOST_STEPS,
            repeat_chunks=True,
            **limits,
        )
        plant = _plant(kind, setup, engine, built.timing)
        reads = not vllm if setup.peer_reads is None else setup.peer_reads
        layout = f"tp{tp}" if reads and kind.prefix_caching else ""
        rehearses = not vllm if setup.rehearses is None else setup.rehearses
        rehearsed = rehearse(built.timing, engine) if rehearses else ()
        plants.append(replace(plant, layout=layout, rehearsed=rehearsed))
    return plants, overhead


def _plant(kind: Members, setup: Setup, engine: EngineConfig, timing: Timing) -> Plant:
    size, vllm = kv_bytes(setup.model), setup.engine == "vllm"
    tiers = kind.tiers or (setup.tiers if kind.prefix_caching else ())
    if not tiers:
        return Plant(kind, engine, timing, size, vllm)
    names = [each.name for each in tiers]
    if len(set(names)) < len(names):
        raise ConfigError(
            f"tiers are named {', '.join(names)}; give each a name of its own, by which its "
            "figures are told"
        )
    if not size:
        raise ConfigError("tiers are given, and no model; its KV's size is needed: give --model")
    worth = worth_of(timing, engine.block_size, engine.max_batched_tokens)
    plant = Plant(kind, engine, timing, size, vllm, tiers, worth, setup.tier_recall)
    plant.make_tiers()  # what cannot be had is said now
    return plant


def _figures(members: Sequence[Member], nanos: int) -> list[dict[str, Any]]:
    found = []
    for member in members:
        steps, busy, queries, hits = member.figures
        found.append(
            {
                "worker": member.name,
                "steps": steps,
                "busy": busy / nanos if nanos else 0.0,
                "prefix_hit_ratio": hits / queries if queries else 0.0,
                **_tiers(member),
            }
        )
    return found


def _tiers(member: Member) -> dict[str, Any]:
    """Return what a worker's tiers did since it came up; nothing where there are none."""
    tiers = member.sim.core.tiers if member.sim is not None else None
    if tiers is None:
        return {}
    names = [config.name for config in member.plant.tiers]
    found = {}
    for name, tier, counts in zip(names, tiers.tiers, tiers.counts, strict=True):
        found[name] = {
            "used_bytes": tier.used_bytes,
            "cap_bytes": tier.cap_bytes,
            "stored_blocks": counts.stored,
            "restored_blocks": counts.restored,
            "evicted_blocks": counts.evicted,
        }
    return {"tiers": found}


#: Requests of the small simulation, and how many a second: long enough for an assessment.
_REQUESTS, _RATE = 40, 6.0
_LENGTHS = Lengths(input=(600, 600), output=(40, 40), templates=8)
#: Prompts that the small caches hold, so that something is evicted.
_PROMPTS = 4
#: Workers of a kind, at most: two cost the same at first, and one is drawn.
_WORKERS = 2


def warm_up(fleet: FleetConfig, setup: Setup, control: ControlConfig) -> None:
    """Run a small simulation, so that kernels are compiled or loaded.

    Takes some seconds the first time on a machine, and a fraction of one after that.
    """
    startup_profiling.warm_up()
    prefix_index.warm_up()  # small caches never outgrow its tables
    kinds = tuple(
        msgspec.structs.replace(
            each,
            count=min(each.count, _WORKERS),
            starts=0.0,
            slow=(),
            fails=(),
            blocks=-(-_PROMPTS * _LENGTHS.longest // each.block_size),
        )
        for each in fleet.workers
    )
    small = msgspec.structs.replace(fleet, workers=kinds)
    setup = msgspec.structs.replace(setup, max_model_len=0)
    load = renewal(_LENGTHS, _RATE, 1.0, _REQUESTS, 0.0, seed=0)
    Simulation(load, small, setup, control, ClientConfig()).run()
