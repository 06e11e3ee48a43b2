"""Workloads that every routing policy is tried on: fleets, loads and the latencies they ask for.

Workers tell what they measured of their speed before they were ready, as Pigou's do, but for
those of `cold` workloads. Open loops are of `REQUESTS` requests unless told otherwise; long ones
are few seconds of growing and draining load beside many of steady load. A seed takes its own window
of a trace, its own sessions, or its own draws, the same for every policy.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from pigou.config import ControlConfig
from pigou.control.routing.policy import RoutingPolicy
from pigou.request import SECOND
from pigou.sim.client import ClientConfig
from pigou.sim.fleet_config import FleetConfig, read_fleet
from pigou.sim.setup import Setup
from pigou.sim.simulation import UNLIMITED, Simulation
from pigou.sim.workload import (
    ClosedLoop,
    OpenLoop,
    RequestLengths,
    RequestSession,
    RequestSpec,
    renewal,
)
from pigou.workload.trace import Trace, some
from pigou.workload.trace_formats import read_trace
from pigou.workload.workload_spec import from_trace
from pigou_lab.experiments.fleets import PolicySetting, Reading, fleet, make_simulation
from pigou_lab.experiments.prices import MIXED

REQUESTS = 240
TURNS = 12
MOONCAKE = "mooncake/conversation_trace.jsonl.zst"
AZURE = "azure/AzureLLMInferenceTrace_code.csv.zst"
AGENTS = "agent-sessions"
_SERVEGEN = "servegen-deepseek-r1"
#: Second of ServeGen's day at which its clients are taken.
_NOON = 43_200

#: From traces' folder and seed to a load.
Load = Callable[[Path, int], OpenLoop]


class Maker(Protocol):
    """Puts a run together: of a policy by its name, or of one that is given in its place."""

    def __call__(
        self, traces: Path, policy: str, params: Mapping[str, Any], seed: int,
        given: RoutingPolicy | None = None, /,
    ) -> Simulation:  # fmt: skip
        """Return the run of one seed; `traces` is the folder of the traces."""
        ...


@dataclass(frozen=True)
class Scenario:
    """A workload on a fleet."""

    name: str
    ttft_s: float  # seconds to the first token that a request asks for
    tpot_s: float  # seconds a token, on average over the request, that it asks for
    # tokens that thresholds of the prefill queue are multiples of; 0 without such workers.
    batch: int
    make: Maker = field(repr=False)  # puts the run together


def control_config(policy: str, params: Mapping[str, Any], seed: int) -> ControlConfig:
    """Return a control plane without limits; `chunk` is tokens per step of workers that decode."""
    own = dict(params)
    point = {"max_batched_tokens": int(own.pop("chunk"))} if "chunk" in own else {}
    points = {"light": point, "heavy": point} if point else {}
    return ControlConfig(
        policy=policy, params=own, operating_points=points, max_inflight=UNLIMITED,
        max_queued=UNLIMITED, max_inflight_tokens=UNLIMITED, queue_timeout=UNLIMITED, seed=seed,
    )  # fmt: skip


def paper_loop(name: str, reading: Reading, users: int, cold: bool = False) -> Maker:
    """Return what makes a closed loop of the paper; each prompt is like no other."""
    which = fleet(name)
    law = which.law(reading)
    if reading == "serial-prefill":
        law = msgspec.structs.replace(law, mixed=MIXED[which.name])
    loop = ClosedLoop(
        lengths=RequestLengths(input=(128, 128), output=(256, 256)),
        phases=((users, 20.0),),
        ramp=10.0,
    )

    def make(
        _: Path, policy: str, params: Mapping[str, Any], seed: int,
        given: RoutingPolicy | None = None,
    ) -> Simulation:  # fmt: skip
        return make_simulation(
            which, reading, loop, seed, law=law, rehearses=not cold, policy=given,
            setting=PolicySetting(policy=policy, params=params),
        )  # fmt: skip

    return make


def _paper(name: str, reading: Reading, users: int, tpot: float, cold: bool) -> Scenario:
    made = paper_loop(name, reading, users, cold)
    return Scenario(f"{name} {reading} C={users}", 0.25, tpot, 128, made)


def _llama(name: str, members: str, load: Load, cold: bool) -> Scenario:
    """Return a load on Llama-3.1-8B on H200s."""

    setup = Setup(model="llama-3.1-8b", gpu="H200", rehearses=not cold)
    made = llama_run(load, read_fleet(members), setup, 10.0)
    return Scenario(f"{name} {members}", 2.0, 0.03, 2048 if "p" in members else 0, made)


def llama_run(load: Load, fleet: FleetConfig, setup: Setup, assess_every_s: float) -> Maker:
    """Return what makes a run of a load on a fleet."""

    def make(
        traces: Path, policy: str, params: Mapping[str, Any], seed: int,
        given: RoutingPolicy | None = None,
    ) -> Simulation:  # fmt: skip
        return Simulation(
            load(traces, seed), fleet, setup, control_config(policy, params, seed), ClientConfig(),
            seed=seed, assess_every=assess_every_s, policy=given,
        )  # fmt: skip

    return make


def poisson(rate: float, requests: int) -> Load:
    lengths = RequestLengths(input=(256, 4096), output=(32, 256))
    return lambda _, seed: renewal(lengths, rate, 1.0, requests, 0.0, seed)


@lru_cache
def read_cached(path: Path) -> Trace:
    return read_trace(path)


def window(name: str, rate: float, requests: int) -> Load:
    """Return `requests` consecutive requests of a trace, at a mean `rate` a second."""

    def load(traces: Path, seed: int) -> OpenLoop:
        sessions = read_cached(traces / name).sessions
        windows = len(sessions) // requests
        begin = np.random.default_rng(5).permutation(windows)[seed % windows] * requests
        kept = sessions[begin : begin + requests]
        span = max(1e-9, kept[-1].start - kept[0].start)
        speed = requests / rate / span
        moved = tuple(replace(s, start=(s.start - kept[0].start) * speed) for s in kept)
        return from_trace(replace(read_cached(traces / name), sessions=moved))

    return load


def _agents(sessions: int) -> Load:
    """Return the first turns of concurrent agent sessions, thinking a tenth as long."""

    def load(traces: Path, seed: int) -> OpenLoop:
        drawn = some(read_cached(traces / AGENTS), sessions, np.random.default_rng(seed))
        cut = tuple(
            replace(s, turns=tuple(replace(t, think=t.think / 10) for t in s.turns[:TURNS]))
            for s in drawn.sessions
        )
        return from_trace(replace(drawn, sessions=cut), sessions)

    return load


@lru_cache
def _clients(folder: Path) -> list[tuple[str, float, float, Any, Any]]:
    """Name, rate, cv of gaps, and tokens of prompts and outputs, of ServeGen's clients at noon."""
    found = []
    for path in sorted(folder.glob("chunk-*-trace.csv")):
        rows = [line.split(",") for line in path.read_text().splitlines()]
        rate, cv = next(((float(r[1]), float(r[2])) for r in rows if int(r[0]) == _NOON), (0, 0))
        known = json.loads(
            path.with_name(path.name.replace("trace.csv", "dataset.json")).read_text()
        )
        lengths = [each for at, each in known.items() if int(at) <= _NOON] or list(known.values())
        if rate > 0 and lengths:
            kinds = [ast.literal_eval(lengths[-1][n]) for n in ("input_tokens", "output_tokens")]
            if all(kinds):
                found.append((path.stem, rate, cv, *kinds))
    return found


def tenants(rate: float, requests: int) -> Load:
    """Return `requests` requests of ServeGen's clients, at `rate` a second altogether."""

    def load(traces: Path, seed: int) -> OpenLoop:
        rng, clients = np.random.default_rng(seed), _clients(traces / _SERVEGEN)
        scale = rate / sum(each[1] for each in clients)
        sessions = []
        for name, own, cv, inputs, outputs in clients:
            spread = max(cv, 0.1) ** 2
            count = 8 + round(2 * requests * own * scale / rate)
            times = np.cumsum(rng.gamma(1 / spread, spread / (own * scale), count))
            drawn = zip(times, _draw(inputs, count, rng), _draw(outputs, count, rng), strict=True)
            for at, tokens, output in drawn:
                job = RequestSpec(int(min(tokens, 32_000)), int(min(output, 512)), tenant=name)
                sessions.append(RequestSession(round(at * SECOND), (job,)))
        sessions.sort(key=lambda each: each.start_ns)
        return OpenLoop(tuple(sessions[:requests]))

    return load


def _draw(kinds: Mapping[int, float], count: int, rng: np.random.Generator) -> Any:
    weight = np.array(list(kinds.values()))
    return np.maximum(1, rng.choice(list(kinds), count, p=weight / weight.sum()))


def scenarios(cold: bool = False, requests: int = REQUESTS) -> list[Scenario]:
    """Return all of them.

    Args:
        cold: workers tell nothing of their speed.
        requests: of an open loop. Only those whose length this decides are returned where it is
            not `REQUESTS`.
    """
    found = [] if requests != REQUESTS else _closed(cold)
    for members, scale in (("4xboth", 3.0), ("1p+2d", 1.0)):
        loads = {
            "poisson middle": poisson(scale * 9.0, requests),
            "poisson high": poisson(scale * 18.0, requests),
            "mooncake": window(MOONCAKE, scale * 3.0, requests),
            "azure code": window(AZURE, scale * 12.0, requests),
            "agents": _agents(round(4 * scale)),
            "tenants": tenants(scale * 16.0, requests),
        }
        if requests != REQUESTS:
            del loads["agents"]
        found += [_llama(name, members, load, cold) for name, load in loads.items()]
    return found


def _closed(cold: bool) -> list[Scenario]:
    """Return the closed loops of the paper's fleets."""
    return [
        _paper("340b-1p2d", "serial-prefill", 64, 0.0254, cold),
        _paper("340b-1p2d", "serial-prefill", 128, 0.0254, cold),
        _paper("340b-1p2d", "serial-prefill", 256, 0.0254, cold),
        _paper("70b-1p2d", "serial-prefill", 128, 0.0099, cold),
        _paper("70b-1p5d", "serial-prefill", 256, 0.0093, cold),
        _paper("340b-1p2d", "client-pool", 128, 0.0254, cold),
        _paper("340b-1p2d", "fair", 128, 0.0254, cold),
    ]
