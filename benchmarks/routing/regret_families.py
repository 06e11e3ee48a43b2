"""Workload families of the routing regret: those that choose constants, and those that judge them.

The split was written down before the price was designed. A design, its terms and its constants are
chosen on `choosing()` alone; `judging()` is run when the design is final. No fleet, trace or seed
of the judging side was tried before.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from benchmarks.routing.policy_workloads import (
    AGENTS,
    AZURE,
    MOONCAKE,
    TURNS,
    Load,
    Maker,
    llama_run,
    paper_loop,
    poisson,
    read_cached,
    tenants,
    window,
)
from pigou.sim.fleet_config import FleetConfig, Outage, Signals, Slow, WorkerGroup, read_fleet
from pigou.sim.setup import Setup
from pigou.sim.simulation import Simulation
from pigou.sim.workload import OpenLoop, RequestLengths, renewal
from pigou.workload.trace import some
from pigou.workload.workload_spec import from_trace

#: Requests of an open loop.
REQUESTS = 480
#: Seeds of the judging side; the choosing side has 1, 2, ....
FIRST_JUDGING_SEED = 101
#: Requests a second of `_MIXED` on 4xboth that the best policy serves: the highest rate at which
#: the mean time is below twice that at 10 requests a second
#: (`python -m benchmarks.routing.regret --capacity`).
CAPACITY_RPS = 23.0
_MIXED = RequestLengths(input=(64, 8192), output=(16, 512))
_LONGEST = 80_000


@dataclass(frozen=True)
class Workload:
    """A load on a fleet."""

    name: str
    family: str
    make: Maker = field(repr=False)  # puts the run together


def _on(family: str, name: str, fleet: FleetConfig | str, load: Load, blocks: int = 0) -> Workload:
    """Return a load on workers of Llama-3.1-8B on H200s, which told how fast they are."""
    members = read_fleet(fleet) if isinstance(fleet, str) else fleet
    setup = Setup(model="llama-3.1-8b", gpu="H200", rehearses=True, blocks=blocks)
    return Workload(name, family, llama_run(load, members, setup, 600.0))


def _paper(fleet: str, users: int) -> Workload:
    return Workload(
        f"{fleet} C={users}", "paper's closed loops", paper_loop(fleet, "serial-prefill", users)
    )


def _agents(sessions: int, concurrency: int, faster: float, turns: int | None = None) -> Load:
    """Return agent sessions at a concurrency, thinking `faster` times as fast as they did.

    With `turns` they have no more than these, and prompts that fit a short memory.
    """

    def load(traces: Path, seed: int) -> OpenLoop:
        trace = read_cached(traces / AGENTS)
        if turns is not None:
            fit = [
                one
                for one in trace.sessions
                if max(turn.input + turn.output for turn in one.turns[:turns]) < _LONGEST
            ]
            trace = replace(trace, sessions=tuple(fit))
        drawn = some(trace, sessions, np.random.default_rng(seed))
        thinking = tuple(
            replace(one, turns=tuple(
                replace(turn, think=turn.think / faster) for turn in one.turns[:turns]
            ))
            for one in drawn.sessions
        )  # fmt: skip
        return from_trace(replace(drawn, sessions=thinking), concurrency)

    return load


def _mixed(rate: float) -> Load:
    return lambda _, seed: renewal(_MIXED, rate, 1.0, REQUESTS, 0.0, seed)


def choosing() -> list[Workload]:
    """Return the workloads that may choose terms and constants."""
    cases = []
    for fleet, scale in (("4xboth", 3.0), ("1p+2d", 1.0)):
        for label, rate in (("middle", 9.0), ("high", 18.0)):
            cases.append(_on("poisson", f"poisson {label} {fleet}", fleet,
                             poisson(scale * rate, REQUESTS)))  # fmt: skip
        cases.append(_on("mooncake", f"mooncake {fleet}", fleet,
                         window(MOONCAKE, scale * 3.0, REQUESTS)))  # fmt: skip
        cases.append(_on("agents, a tenth of think time", f"agents/10 {fleet}", fleet,
                         _agents(round(4 * scale), round(4 * scale), 10.0, TURNS)))  # fmt: skip
    for sessions, blocks in ((24, 12_000), (32, 12_000), (24, 8_000)):
        cases.append(_on("agents, a tenth of think time", f"agents/10 C={sessions} {blocks} blocks",
                         "4xboth", _agents(sessions, sessions, 10.0, TURNS), blocks))  # fmt: skip
    cases.append(_on("agents, a tenth of think time", "agents/10 C=40 whole sessions", "4xboth",
                     _agents(48, 40, 10.0)))  # fmt: skip
    cases += [_paper("340b-1p2d", users) for users in (64, 128, 256)]
    return [*cases, _paper("70b-1p2d", 128), _paper("70b-1p5d", 256)]


#: Nothing is late or lost.
_PROMPT = Signals()


def _unequal(signals: Signals = _PROMPT) -> FleetConfig:
    groups = (WorkerGroup(gpu="H200"), WorkerGroup(gpu="H100"), WorkerGroup(gpu="A100", count=2))
    return FleetConfig(workers=groups, signals=signals)


def _troubled(*groups: WorkerGroup, signals: Signals = _PROMPT) -> FleetConfig:
    return FleetConfig(workers=groups, signals=signals, detect_ms=500.0)


#: Late by half a second, with a fifth of the batches lost, and reports every two seconds.
_STALE = Signals(
    event_delay_ms=500.0, event_loss=0.2, report_every_ms=2000.0, report_delay_ms=500.0,
    report_loss=0.2,
)  # fmt: skip


def judging() -> list[Workload]:
    """Return the workloads that judge a final design, and choose nothing."""
    cases = [
        _on("azure code", f"azure code at {rate:g}/s 4xboth", "4xboth",
            window(AZURE, rate, REQUESTS))
        for rate in (12.0, 24.0, 36.0)
    ]  # fmt: skip
    cases += [
        _on("agents, own think times", f"agents C={count}", "4xboth",
            _agents(round(1.5 * count), count, 1.0))
        for count in (8, 16, 24, 32)
    ]  # fmt: skip
    cases += [
        _on("tenants", f"tenants {fleet}", fleet, tenants(rate, REQUESTS))
        for fleet, rate in (("4xboth", 48.0), ("2p+3d", 32.0))
    ]
    cases += [
        _on("unequal GPUs", "unequal, mixed lengths", _unequal(), _mixed(16.0)),
        _on("unequal GPUs", "unequal, mooncake", _unequal(), window(MOONCAKE, 5.0, REQUESTS)),
        _on("unequal GPUs", "unequal and stale, tenants", _unequal(_STALE),
            tenants(20.0, REQUESTS)),
    ]  # fmt: skip
    slow = WorkerGroup(slow=(Slow(factor=3.0, start=5.0, end=15.0),))
    failing = WorkerGroup(fails=(Outage(start=6.0, end=16.0),))
    cases += [
        _on("slow and failing", "one slow, mixed lengths",
            _troubled(WorkerGroup(count=3), slow), _mixed(20.0)),
        _on("slow and failing", "one failing, mooncake",
            _troubled(WorkerGroup(count=3), failing), window(MOONCAKE, 8.0, REQUESTS)),
        _on("stale and lossy", "stale, mooncake",
            _troubled(WorkerGroup(count=4), signals=_STALE), window(MOONCAKE, 9.0, REQUESTS)),
        _on("stale and lossy", "stale, agents C=12",
            _troubled(WorkerGroup(count=4), signals=_STALE), _agents(18, 12, 1.0)),
    ]  # fmt: skip
    for fleet, rate in (("2p+2d", 4.0), ("2p+3d", 5.0), ("8xboth", 20.0), ("16xboth", 40.0)):
        cases.append(_on("fleets", f"mooncake {fleet}", fleet, window(MOONCAKE, rate, REQUESTS)))
        cases.append(_on("fleets", f"mixed lengths {fleet}", fleet, _mixed(2.0 * rate)))
    cases.append(_on("fleets", "agents 2p+3d", "2p+3d", _agents(18, 12, 1.0)))
    return cases + [
        _on("loads", f"mixed lengths at {share:.0%}", "4xboth", _mixed(share * CAPACITY_RPS))
        for share in (0.5, 0.8, 0.95, 1.2)
    ]


def capacity_run(rate: float, policy: str) -> Simulation:
    """Return a run of mixed lengths on 4xboth at a rate, of a seed that judges nothing."""
    workload = _on("loads", "", "4xboth", _mixed(rate))
    return workload.make(Path(), policy, {}, 7)
