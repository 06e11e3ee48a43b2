"""Small simulations for tests."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from pigou.config import ControlConfig
from pigou.sim.client import ClientConfig
from pigou.sim.fleet_config import (
    FleetConfig,
    LinkConfig,
    Outage,
    Signals,
    Slow,
    WorkerGroup,
    read_fleet,
)
from pigou.sim.request_run import RequestRun
from pigou.sim.result import SimulationResult
from pigou.sim.setup import Setup
from pigou.sim.simulation import UNLIMITED, Simulation
from pigou.sim.workload import ClosedLoop, OpenLoop, RequestLengths, renewal

LAW = "law:itl_a=0.008,itl_b=0.0003,prefill=0.004,prefill_token=0.00005"
__all__ = ["FleetConfig", "LinkConfig", "Outage", "Signals", "Slow", "WorkerGroup", "read_fleet"]


def open_loop(rate: float = 20.0, count: int = 60, templates: int = 5, seed: int = 1) -> OpenLoop:
    """Requests of different lengths, some with equal prompts."""
    lengths = RequestLengths(input=(20, 400), output=(1, 60), templates=templates)
    return renewal(lengths, rate, 1.5, count, 0.0, seed)


def closed_loop(users: int, seconds: float, **rest: Any) -> ClosedLoop:
    """Users with the paper's lengths."""
    lengths = RequestLengths(input=(128, 128), output=(64, 64))
    return ClosedLoop(lengths=lengths, phases=((users, seconds),), **rest)


def simulation(
    workload: OpenLoop | ClosedLoop,
    fleet: str | FleetConfig = "2xboth",
    *,
    client: ClientConfig | None = None,
    control: dict[str, Any] | None = None,
    setup: dict[str, Any] | None = None,
    seed: int = 0,
    stepwise: bool = False,
) -> Simulation:
    """A simulation under a law."""
    given = {"timing": LAW, "blocks": 200, "max_seqs": 16, "max_batched_tokens": 128}
    limits = {"policy": "least-loaded", "max_inflight": UNLIMITED, "max_inflight_tokens": UNLIMITED}
    return Simulation(
        workload,
        read_fleet(fleet) if isinstance(fleet, str) else fleet,
        msgspec.convert(given | (setup or {}), Setup),
        msgspec.convert(limits | (control or {}), ControlConfig),
        client or ClientConfig(),
        seed=seed,
        stepwise=stepwise,
    )


def figures(result: SimulationResult) -> str:
    """All figures but those of the machine that computed them."""
    document = result.document()
    del document["wall_s"], document["peak_rss_mb"]
    return json.dumps(document)


def check_times(request: RequestRun) -> None:
    """A request that is done has all its tokens, and its times are in order."""
    assert request.output_tokens == request.spec.output_tokens
    assert (
        request.intended_ns
        <= request.sent_ns
        <= request.first_token_ns
        <= request.last_token_ns
        == request.ended_ns
    )


def differences(one: SimulationResult, other: SimulationResult) -> dict[str, Any]:
    """Figures that are not the same to the last digit."""
    left, right = json.loads(figures(one)), json.loads(figures(other))
    return {name: (left[name], right[name]) for name in left if left[name] != right[name]}


def run(*args: Any, **kwargs: Any) -> SimulationResult:
    """Run a simulation, and check the cores at its end."""
    made = simulation(*args, **kwargs)
    result = made.run()
    made.fleet.check()
    return result
