"""Milliseconds of a planner's decision: python -m benchmarks.control.planner.planner_cost

A fleet of 256 workers and 8 models. `steady` is a tick whose load stays in its band; `all new` one
in which the lengths and the rates of all models changed, so that all plans are made anew. Times
are of the processor, so that a busy machine does not count.
"""

from __future__ import annotations

import argparse
import statistics
import time

from pigou.control.planner.planner import PlannerSetup, load
from pigou.games.latency import LatencyLaw
from pigou.objectives import Budget, ProvisioningTimes, Slo
from pigou.performance.model import PerformanceModel
from pigou.performance.speed import DecodeLaw, PrefillLine
from pigou.request import SECOND, Role
from pigou.windows.planner_window import LoadWindow, PlannerWindow, PoolWindow, WorkerWindow

MODEL = PerformanceModel(
    PrefillLine(0.005, 8e-5, 1e-9),
    DecodeLaw(LatencyLaw(0.0004, 0.01), 1e-8),
    kv_tokens=400_000,
    overhead_s=0.02,
)


def fleet(models: int, workers: int, mixed: bool) -> list[PoolWindow]:
    roles = [Role.PREFILL, Role.DECODE] + [Role.BOTH] * mixed
    each = workers // (models * len(roles))
    return [
        PoolWindow(
            name=f"{role}-{model}",
            role=role,
            model=str(model),
            workers=tuple(
                WorkerWindow(
                    id=f"{role}-{model}-{n}", since_ns=-(10**13), running=20, waiting=0,
                    mean_running=20.0, held_tokens=6e4, mean_held_tokens=6e4, itl_s=0.02,
                    queued_prefill_tokens=500.0, computed_prompts=10, computed_tokens=2e4,
                    prefill_s=1.7, kv_usage=0.2, kv_tokens=400_000, cached_tokens=1e5,
                )
                for n in range(each)
            ),
        )
        for model in range(models)
        for role in roles
    ]  # fmt: skip


def window(pools: list[PoolWindow], step: int, rps: float, isl: float, osl: float) -> PlannerWindow:
    models = dict.fromkeys(pool.model for pool in pools)
    loads = tuple(
        LoadWindow(
            model=model, arrivals=round(5 * rps), isl=isl + 37 * int(model), isl_scv=0.5, osl=osl,
            hit_rate=0.3,
        )
        for model in models
    )  # fmt: skip
    return PlannerWindow(now_ns=5 * step * SECOND, seconds=5.0, loads=loads, pools=tuple(pools))


def milliseconds(name: str, models: int, workers: int, mixed: bool, rounds: int) -> None:
    pools = fleet(models, workers, mixed)
    setup = PlannerSetup(
        slo=Slo(ttft_s=1.0, itl_s=0.03),
        budget=Budget(max_gpus=workers),
        times=ProvisioningTimes(),
        performance={pool.name: MODEL for pool in pools},
    )
    planner = load(name, setup)
    steady: list[float] = []
    new: list[float] = []
    step = 0
    for number in range(rounds):
        rps, isl, osl = 15.0 * 1.6 ** (number % 3), 1500.0 * 1.5 ** (number % 4), 150 + 80 * number
        for tick in range(8):
            step += 1
            seen = window(pools, step, rps, isl, osl)
            began = time.process_time()
            planner.observe(seen)
            planner.tick(seen.now_ns)
            seconds = time.process_time() - began
            (new if tick in (0, 1) and number else steady).append(1e3 * seconds)
    both = "with pools that do both" if mixed else "prefill and decode"
    print(
        f"{name:12} {workers} workers, {models} models, {both}: steady median "
        f"{statistics.median(steady):.1f} ms, all new median {statistics.median(new):.1f} ms, "
        f"largest {max([*steady, *new]):.1f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--planner", default="price", help="name of the planner")
    parser.add_argument("--workers", type=int, default=256)
    parser.add_argument("--models", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    for mixed in (False, True):
        milliseconds(args.planner, args.models, args.workers, mixed, args.rounds)


if __name__ == "__main__":
    main()
