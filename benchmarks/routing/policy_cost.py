"""Microseconds that each routing policy takes to cost the candidates of one request.

    python -m benchmarks.routing.policy_cost [--workers 64] [--rounds 7] [--calls 300]

Two fleets of `--workers`: `pool`, where every worker does both, and `apart`, a quarter of
them for prefill, three quarters for decode, where each decode worker is offered alone and with
each of the four soonest prefill workers. The figure is the median over rounds of the mean over
the calls of a round, candidates given; the rounds of all policies are interleaved.
"""

from __future__ import annotations

import argparse
import statistics
import time
from importlib.metadata import entry_points

import numpy as np

from pigou.control.router import candidates
from pigou.control.routing.policy import GROUP, RoutingPolicy, load
from pigou.control.routing.view import Candidates, FleetView
from pigou.request import Request


def fleet_of(workers: int, apart: bool, generator: np.random.Generator) -> FleetView:
    prefill = np.arange(workers) < workers // 4
    counts = {
        name: generator.integers(0, most, workers)
        for name, most in (
            ("prefill_requests", 6),
            ("prefill_tokens", 20_000),
            ("decode_requests", 60),
            ("decode_tokens", 200_000),
            ("served", 1000),
            ("overlap", 128),
        )
    }
    roles = {"prefills": prefill, "decodes": ~prefill} if apart else {}
    return FleetView.of(
        workers,
        **counts,
        **roles,
        waiting=generator.integers(0, 5, workers).astype(np.float64),
        kv_usage=generator.random(workers),
        blocks=np.full(workers, 20_000),
        output=200.0,
    )


def seconds(
    policy: RoutingPolicy, request: Request, fleet: FleetView, offered: Candidates, calls: int
) -> float:
    begin = time.perf_counter()
    for _ in range(calls):
        policy.costs(request, fleet, offered)
    return (time.perf_counter() - begin) / calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=300)
    options = parser.parse_args()
    request = Request("r", 4096, 200)
    every = np.ones(options.workers, dtype=np.bool_)
    names = sorted(entry_points(group=GROUP).names)
    found: dict[tuple[str, str], list[float]] = {}
    for label in ("pool", "apart"):
        fleet = fleet_of(options.workers, label == "apart", np.random.default_rng(1))
        offered = candidates(request, fleet, every, every)
        print(f"{label}: {options.workers} workers, {len(offered)} candidates")
        policies = {name: load(name) for name in names}
        for name in names:
            seconds(policies[name], request, fleet, offered, 50)
        for _ in range(options.rounds):
            for name in names:
                taken = seconds(policies[name], request, fleet, offered, options.calls)
                found.setdefault((name, label), []).append(taken)
    print(f"\n{'policy':<20}{'pool us':>10}{'apart us':>10}")
    for name in names:
        pool, apart = (statistics.median(found[name, each]) * 1e6 for each in ("pool", "apart"))
        print(f"{name:<20}{pool:>10.1f}{apart:>10.1f}")


if __name__ == "__main__":
    main()
