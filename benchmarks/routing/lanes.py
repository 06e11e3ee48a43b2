"""Short requests beside 5% of 128k prompts: one queue against a lane, in the simulator.

    python -m benchmarks.routing.lanes [--seeds 11,12,13] [--lane min_prompt=32768,tokens=64]

Both judge the same draws. TTFT P99 of short requests is over that of the same short requests
without the long ones; a long prompt's TTFT and whole time over the same fleet without short ones.
"""

from __future__ import annotations

import argparse
from random import Random

import numpy as np

from pigou.config import ControlConfig
from pigou.request import SECOND
from pigou.sim.client import ClientConfig
from pigou.sim.fleet_config import read_fleet
from pigou.sim.request_run import RequestRun
from pigou.sim.setup import Setup
from pigou.sim.simulation import UNLIMITED, Simulation
from pigou.sim.workload import OpenLoop, RequestSession, RequestSpec

LONG = 131_072
LANE = "min_prompt=32768,tokens=192,idle_tokens=384,halved_at=32768,yields=3"


def sessions(rate: float, count: int, seed: int) -> list[RequestSession]:
    """Return Poisson arrivals; every 20th is long, in random order."""
    rng, at = Random(seed), 0.0
    long = set(rng.sample(range(count), count // 20))
    drawn = []
    for number in range(count):
        at += rng.expovariate(rate)
        prompt, output = rng.randint(256, 2048), rng.randint(32, 256)
        spec = RequestSpec(LONG if number in long else prompt, output)
        drawn.append(RequestSession(int(at * SECOND), (spec,)))
    return drawn


def run(
    load: list[RequestSession], fleet: str, gpu: str, lane: str, tokens: int, seed: int
) -> list[RequestRun]:
    """Simulate a load; return its requests."""
    setup = Setup(
        model="llama-3.1-8b", gpu=gpu, engine="pigou", long_lane=lane, max_batched_tokens=tokens
    )
    control = ControlConfig(
        max_inflight=UNLIMITED, max_queued=UNLIMITED, max_inflight_tokens=UNLIMITED,
        queue_timeout=UNLIMITED, seed=seed, long_lane=lane,
    )  # fmt: skip
    simulation = Simulation(
        OpenLoop(load), read_fleet(fleet), setup, control, ClientConfig(), seed=seed
    )
    return simulation.run().done


def measures(runs: list[RequestRun]) -> tuple[np.ndarray, np.ndarray]:
    """Return seconds to the first token, and to the last, of each request."""
    ttft = np.array([run.first_token_ns - run.intended_ns for run in runs]) / SECOND
    return ttft, np.array([run.last_token_ns - run.intended_ns for run in runs]) / SECOND


def parts(runs: list[RequestRun]) -> tuple[list[RequestRun], list[RequestRun]]:
    """Split requests into short and long ones."""
    long = [run for run in runs if run.spec.prompt_tokens >= LONG]
    return [run for run in runs if run.spec.prompt_tokens < LONG], long


def main() -> None:
    """Print a row for each setting."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="11,12,13")
    parser.add_argument("--lane", action="append")
    parser.add_argument("--rate", type=float, default=4.5)
    parser.add_argument("--count", type=int, default=600)
    parser.add_argument("--fleet", default="4xboth")
    parser.add_argument("--gpu", default="H200")
    parser.add_argument("--budget", type=int, default=2048)
    args = parser.parse_args()
    seeds = [int(seed) for seed in args.seeds.split(",")]
    loads = {seed: sessions(args.rate, args.count, seed) for seed in seeds}
    short_alone, long_alone = [], []
    for seed, load in loads.items():
        long = [part for part in load if part.requests[0].prompt_tokens == LONG]
        short = [part for part in load if part.requests[0].prompt_tokens < LONG]
        short_alone += run(short, args.fleet, args.gpu, "", args.budget, seed)
        long_alone += run(long, args.fleet, args.gpu, "", args.budget, seed)
    base = float(np.quantile(measures(short_alone)[0], 0.99))
    lone = measures(long_alone)[1]
    print(f"{'':40} short TTFT P50    P99 (ratio)   long mean (ratio)    P99 (ratio)")
    print(f"{'alone':40} {np.median(measures(short_alone)[0]):14.3f} {base:6.3f} (1.00) "
          f"{lone.mean():9.2f} (1.00) {np.quantile(lone, 0.99):9.2f} (1.00)")  # fmt: skip
    for lane in ["", *(args.lane or [LANE])]:
        mixed = [
            r for s in seeds for r in run(loads[s], args.fleet, args.gpu, lane, args.budget, s)
        ]
        short_runs, long_runs = parts(mixed)
        ttft, whole = measures(short_runs)[0], measures(long_runs)[1]
        p99 = float(np.quantile(ttft, 0.99))
        slow = float(np.quantile(whole, 0.99))
        print(f"{lane or 'one queue':40} {np.median(ttft):14.3f} {p99:6.3f} ({p99 / base:.2f}) "
              f"{whole.mean():9.2f} ({whole.mean() / lone.mean():.2f}) "
              f"{slow:9.2f} ({slow / np.quantile(lone, 0.99):.2f})")  # fmt: skip


if __name__ == "__main__":
    main()
