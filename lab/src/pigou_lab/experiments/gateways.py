"""Several gateways on one fleet: Price of Anarchy and fairness by number and staleness.

Each gateway is a production control plane, and hears the others after a lag. Anarchy is mean
request time over that of one gateway; fairness is the largest relative deviation of a tenant's
service under overload. The fleet is eight H100s with Llama-3.1-8B (roofline); constants were tuned
on seeds 101 and 102, and reported on others.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from pigou.request import SECOND
from pigou.sim.client import ClientConfig
from pigou.sim.fleet_config import GatewaysConfig, read_fleet
from pigou.sim.result import SimulationResult
from pigou.sim.setup import Setup
from pigou.sim.simulation import Simulation, unlimited
from pigou.sim.virtual_clock import EPOCH
from pigou.sim.workload import OpenLoop, RequestLengths, RequestSession, merged, renewal
from pigou_lab.experiments.fleets import PaperFleet, Reading
from pigou_lab.experiments.results import COMPARED, Row, over_seeds, run_simulation

#: Milliseconds that messages between gateways take.
LAGS_MS = (0, 100, 1000, 10_000)
COUNTS = (2, 4, 8)
#: Requests a second, seconds of arrivals, and those that are left out at the beginning.
RATE, HOLD_S, SETTLE_S = 60.0, 40.0, 25.0
LENGTHS = RequestLengths(input=(200, 1800), output=(50, 350))
#: Demand of each tenant, in shares of the fleet; together above 1, and each at least its fair part.
DEMANDS = (0.15, 0.15, 0.15, 0.15, 0.3, 0.3, 0.5, 0.5)
#: Streams of a worker in the comparison of shares, requests a second that eight serve so, and
#: seconds of arrivals; unused service that a tenant keeps there.
_STREAMS, _SERVED_RATE, _FAIR_S = 4, 25.0, 30.0
_CREDIT = 2048.0
_FLEET, _SETUP = "8xboth", Setup(model="llama-3.1-8b", gpu="H100")


def gateways(
    _: PaperFleet, __: Reading, seeds: Sequence[int], levels: Sequence[int]
) -> Iterator[Row]:
    """Yield a row for one gateway, then for each number and lag in ms (lag None: no exchange)."""
    single = [_run_of(GatewaysConfig(), seed) for seed in seeds]
    yield _row(0, 1, single, single)
    for count in COUNTS:
        for lag_ms in levels:
            config = GatewaysConfig(count=count, lag_s=lag_ms / 1000)
            yield _row(lag_ms, count, [_run_of(config, seed) for seed in seeds], single)
    for count in COUNTS:
        config = GatewaysConfig(count=count, exchanges=False)
        yield _row(None, count, [_run_of(config, seed) for seed in seeds], single)


def _run_of(config: GatewaysConfig, seed: int) -> dict[str, Any]:
    """Return one seed's figures: times below capacity, shares above."""
    result = run_simulation(simulation(config, seed), gateways=config.count, seed=seed)
    low = EPOCH + round(SETTLE_S * SECOND)
    done = [run for run in result.done if run.intended_ns >= low]
    fair = simulation(config, seed, overloaded=True)
    return {
        "seed": seed,
        "e2e_mean_s": statistics.fmean(r.last_token_ns - r.intended_ns for r in done) / SECOND,
        "ttft_mean_s": statistics.fmean(r.first_token_ns - r.intended_ns for r in done) / SECOND,
        "poa": result.document()["poa"]["whole"],
        "service": service(run_simulation(fair, gateways=config.count, seed=seed)),
    }


def simulation(config: GatewaysConfig, seed: int, overloaded: bool = False) -> Simulation:
    """Return a run: Poisson arrivals, or tenants over capacity in fair order, one gateway each."""
    control = unlimited(seed=seed)
    load, client = renewal(LENGTHS, RATE, 1.0, 0, HOLD_S, seed), ClientConfig()
    if overloaded:
        limits: dict[str, Any] = {
            "max_inflight": _STREAMS,
            "admission": {"order": "fair", "credit": _CREDIT},
        }
        control = msgspec.structs.replace(control, **limits)
        load = tenants(DEMANDS, _SERVED_RATE, _FAIR_S, seed)
        client = ClientConfig(timeout=2 * _FAIR_S)
        if config.count > 1:
            config = msgspec.structs.replace(config, split="tenant")
    fleet = msgspec.structs.replace(read_fleet(_FLEET), gateways=config)
    return Simulation(load, fleet, _SETUP, control, client, seed=seed)


def tenants(demands: Sequence[float], served_rate: float, seconds: float, seed: int) -> OpenLoop:
    """Return Poisson arrivals of tenants `t0`, `t1`, ..., each of a share of the served rate."""
    loops = []
    for number, demand in enumerate(demands):
        loop = renewal(LENGTHS, demand * served_rate, 1.0, 0, seconds, 1000 * seed + number)
        sessions = [
            RequestSession(
                session.start_ns, [replace(r, tenant=f"t{number}") for r in session.requests]
            )
            for session in loop.sessions
        ]
        loops.append(OpenLoop(sessions, rates=loop.rates))
    return merged(loops)


def service(result: SimulationResult) -> dict[str, float]:
    """Return each tenant's share of output tokens while all are active."""
    low, high = (EPOCH + round(share * _FAIR_S * SECOND) for share in (1 / 3, 1.0))
    tokens: Counter[str] = Counter()
    for run in result.done:
        if low <= run.last_token_ns < high:
            tokens[run.spec.tenant] += run.output_tokens
    return {tenant: count / tokens.total() for tenant, count in sorted(tokens.items())}


def deviation(shares: Mapping[str, float], of_one: Mapping[str, float]) -> float:
    """Return the largest relative deviation of a tenant's share from that at one gateway."""
    return max(abs(shares.get(tenant, 0.0) / share - 1.0) for tenant, share in of_one.items())


def _row(
    lag_ms: int | None, count: int, runs: Sequence[dict[str, Any]], single: Sequence[dict[str, Any]]
) -> Row:
    ratios = [a["e2e_mean_s"] / b["e2e_mean_s"] for a, b in zip(runs, single, strict=True)]
    ttfts = [a["ttft_mean_s"] / b["ttft_mean_s"] for a, b in zip(runs, single, strict=True)]
    unfair = [deviation(a["service"], b["service"]) for a, b in zip(runs, single, strict=True)]
    row: Row = {
        "experiment": "gateways", "concurrency": count, "gateways": count,
        "lag_s": None if lag_ms is None else lag_ms / 1000,
        "anarchy_range": [min(ratios), max(ratios)],
        "unfairness_range": [min(unfair), max(unfair)], "runs": list(runs),
    }  # fmt: skip
    own = {name: [run[name] for run in runs] for name in ("poa", "e2e_mean_s")}
    row |= over_seeds({"anarchy": ratios, "ttft_ratio": ttfts, "unfairness": unfair, **own})
    return row | dict.fromkeys(COMPARED)


def verdict(rows: Sequence[Row]) -> Mapping[str, Any]:
    """Return the worst anarchy and unfairness, and the cost of no exchange, by number."""
    informed = [row for row in rows if row["lag_s"] is not None]
    silent = [row for row in rows if row["lag_s"] is None]
    return {
        # Below 1 is noise of the runs: the gateways did as well as one would.
        "worst_anarchy": max(1.0, *(float(row["anarchy"]) for row in informed)),
        "worst_unfairness": max(float(row["unfairness"]) for row in informed),
        "silent_anarchy": {str(row["gateways"]): row["anarchy"] for row in silent},
        "silent_unfairness": {str(row["gateways"]): row["unfairness"] for row in silent},
    }
