"""Caps that fall with preemptions: preemptions, goodput and latency with and without them.

    python -m benchmarks.routing.preemption_cap --seeds 11,12,13

Outputs have a long tail, and a worker's KV holds fewer streams than its `max_seqs`. The cap's
constants were chosen on seeds 1 and 2. Goodput: requests per second of arrivals with TTFT within
`--ttft` and ITL within `--itl`.
"""

from __future__ import annotations

import argparse
from random import Random

import numpy as np

from pigou.config import ControlConfig
from pigou.request import SECOND
from pigou.sim.client import ClientConfig
from pigou.sim.fleet_config import read_fleet
from pigou.sim.setup import Setup
from pigou.sim.simulation import UNLIMITED, Simulation
from pigou.sim.workload import OpenLoop, RequestSession, RequestSpec


def sessions(rate: float, count: int, seed: int) -> list[RequestSession]:
    """Return Poisson arrivals with log-normal outputs, 400 tokens in the mean."""
    rng, at = Random(seed), 0.0
    drawn = []
    for _ in range(count):
        at += rng.expovariate(rate)
        output = min(4000, max(1, round(rng.lognormvariate(5.5, 1.0))))
        drawn.append(
            RequestSession(int(at * SECOND), (RequestSpec(rng.randint(256, 1024), output),))
        )
    return drawn


def main() -> None:
    """Print a row for each setting."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="11,12,13")
    parser.add_argument("--rate", type=float, default=22.0)
    parser.add_argument("--count", type=int, default=1200)
    parser.add_argument("--blocks", type=int, default=2500)
    parser.add_argument("--ttft", type=float, default=5.0)
    parser.add_argument("--itl", type=float, default=0.05)
    parser.add_argument("--aware", action="store_true", help="the gateway knows the KV's tokens")
    args = parser.parse_args()
    print("cap     preemptions  goodput/s  TTFT P50    P99  ITL P99  e2e mean")
    for capped in (False, True):
        runs, seconds, preemptions = [], 0.0, 0
        for seed in map(int, args.seeds.split(",")):
            control = ControlConfig(
                preemption_cap=capped, max_queued=UNLIMITED, queue_timeout=UNLIMITED, seed=seed,
                max_inflight_tokens=0 if args.aware else UNLIMITED,
            )  # fmt: skip
            setup = Setup(model="llama-3.1-8b", gpu="H100", blocks=args.blocks)
            load = OpenLoop(sessions(args.rate, args.count, seed))
            result = Simulation(
                load, read_fleet("2xboth"), setup, control, ClientConfig(), seed=seed
            ).run()
            runs += result.done
            preemptions += sum(run.preemptions for run in result.runs)
            seconds += max(run.intended_ns for run in result.runs) / SECOND
        ttft = np.array([run.first_token_ns - run.intended_ns for run in runs]) / SECOND
        whole = np.array([run.last_token_ns - run.intended_ns for run in runs]) / SECOND
        gaps = np.maximum(1, np.array([run.output_tokens - 1 for run in runs]))
        itl = (whole - ttft) / gaps
        good = np.count_nonzero((ttft <= args.ttft) & (itl <= args.itl)) / seconds
        print(f"{'falls' if capped else 'none':8}{preemptions:11}{good:11.2f}"
              f"{np.median(ttft):10.3f}{np.quantile(ttft, 0.99):7.3f}"
              f"{np.quantile(itl, 0.99):9.4f}{whole.mean():10.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
