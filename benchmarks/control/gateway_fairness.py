"""Fairness across gateways: the largest disparity of service, by gateways, lag and order.

    python -m benchmarks.control.gateway_fairness [--orders fair,drf] [--gateways 1,2,4]
        [--lags 0,0.1,1,10] [--seconds 60] [--seed 1]

Two H100s (roofline, virtual time), each gateway a production control plane. Tenants ask for 0.6,
0.9 and 1.5 of what the fleet serves, so all wait after a short time. `spread`: each request goes to
any gateway; `kept`: each tenant to one of its own. Disparity is the largest change of a difference
between two tenants' service (prompt + 2 output tokens) within the time that all of them wait, over
the fleet's service in that time. The bound is that of docs/internals/gateways.md, for `fair` and
`spread`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from pigou.request import SECOND
from pigou.sim.client import ClientConfig
from pigou.sim.fleet_config import GatewaysConfig, read_fleet
from pigou.sim.result import SimulationResult
from pigou.sim.setup import Setup
from pigou.sim.simulation import Simulation, unlimited
from pigou.sim.virtual_clock import EPOCH
from pigou_lab.experiments.gateways import tenants

DEMANDS = (0.6, 0.9, 1.5)
#: Requests a second that the fleet serves with four streams a worker, and its tokens in flight.
SERVED_RATE, STREAMS, WORKERS = 6.2, 4, 2
CREDIT, SETTLE_S, SAMPLE_S = 2048.0, 5.0, 0.25


def run(order: str, config: GatewaysConfig, seconds: float, seed: int) -> SimulationResult:
    """Run one case."""
    admission: dict[str, Any] = {"order": order}
    if order == "fair":
        admission["credit"] = CREDIT
    control = msgspec.structs.replace(
        unlimited(seed=seed), max_inflight=STREAMS, admission=admission
    )
    fleet = msgspec.structs.replace(read_fleet(f"{WORKERS}xboth"), gateways=config)
    client = ClientConfig(timeout=4 * seconds)
    setup = Setup(model="llama-3.1-8b", gpu="H100")
    load = tenants(DEMANDS, SERVED_RATE, seconds, seed)
    return Simulation(load, fleet, setup, control, client, seed=seed).run()


def service(result: SimulationResult, times: NDArray[np.float64]) -> dict[str, Any]:
    """Return each tenant's cumulative service at some times, in seconds of the run."""
    counts = {f"t{number}": np.zeros(len(times)) for number in range(len(DEMANDS))}
    for done in result.done:
        first, last = ((ns - EPOCH) / SECOND for ns in (done.first_token_ns, done.last_token_ns))
        part = np.clip((times - first) / max(last - first, 1e-9), 0.0, 1.0)
        counts[done.spec.tenant] += done.spec.prompt_tokens * (times >= first)
        counts[done.spec.tenant] += 2.0 * done.output_tokens * part
    return counts


def disparity(counts: dict[str, Any]) -> float:
    """Return the largest change of the difference between two tenants' service."""
    gaps = [counts[a] - counts[b] for a, b in combinations(counts, 2)]
    return float(max(np.ptp(gap) for gap in gaps))


def bound(rate: float, lag_s: float, gateways: int) -> float:
    """Return the bound of `fair`, all tenants waiting at all gateways."""
    vtc = 2.0 * max(1800.0, 2.0 * STREAMS * WORKERS * (1800.0 + 350.0)) + CREDIT
    return vtc + 2.0 * rate * lag_s * (gateways - 1) / gateways


def numbers(text: str, kind: type = float) -> list[Any]:
    return [kind(part) for part in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--orders", default="fair")
    parser.add_argument("--gateways", default="1,2,4")
    parser.add_argument("--lags", default="0,0.1,1,10")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(arguments)
    times = np.arange(SETTLE_S, args.seconds, SAMPLE_S)
    print(
        "order    split   gateways  lag s   disparity   of service  after 2 lags       bound  CPU s"
    )
    for order in args.orders.split(","):
        for count in numbers(args.gateways, int):
            for split in ("spread", "kept")[: 1 if count == 1 else 2]:
                for lag_s in numbers(args.lags) if count > 1 else [0.0]:
                    began = time.process_time()
                    config = GatewaysConfig(
                        count=count, lag_s=lag_s, split="tenant" if split == "kept" else "random"
                    )
                    counts = service(run(order, config, args.seconds, args.seed), times)
                    whole = sum(values[-1] - values[0] for values in counts.values())
                    rate = whole / (times[-1] - times[0])
                    gap, later = disparity(counts), times >= SETTLE_S + 2 * lag_s
                    settled = disparity({name: values[later] for name, values in counts.items()})
                    known = split == "spread" and order == "fair"
                    most = bound(rate, lag_s, count) if known else float("nan")
                    print(
                        f"{order:<8} {split:<7} {count:8} {lag_s:6.1f} {gap:11,.0f} "
                        f"{gap / whole:11.1%} {settled / whole:12.1%} {most:11,.0f} "
                        f"{time.process_time() - began:6.1f}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
