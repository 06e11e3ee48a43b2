"""Agent sessions whose caches do not fit: what the price of memory in `toll` is worth.

    python -m benchmarks.routing.memory_price --traces FOLDER [--seeds 5] [--lengths online]

Sessions of the traces' agents whose prompts stay below 80,000 tokens, 12 turns each, think a
tenth as long as they did; Llama-3.1-8B on H200s (roofline), whose workers have as many KV blocks
of 16 tokens as the name of the workload says. `toll, memory free` is `toll` without its price of
memory. With `--lengths online` outputs are predicted, and `toll, certain` takes them for certain:
prices have no share of their variance. Mean seconds from arrival to last token, and the share of
prompt tokens that were cached, are means over seeds; the difference from `toll, memory free` is of
the same seeds, with a 95% interval.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.routing.policy_workloads import AGENTS, TURNS, control_config, read_cached
from pigou.control.routing.policy import CostTable, RequestView, RoutingPolicy, load
from pigou.control.routing.toll.policy import Toll
from pigou.control.routing.view import Candidates, FleetView
from pigou.engine.startup_profiling import warm_up
from pigou.sim.client import ClientConfig
from pigou.sim.fleet_config import read_fleet
from pigou.sim.setup import Setup
from pigou.sim.simulation import Simulation
from pigou.sim.workload import OpenLoop
from pigou.workload.trace import some
from pigou.workload.workload_spec import from_trace
from pigou_lab.experiments.prices import paired

_LONGEST = 80_000
POLICIES = ("toll", "dynamo-paper", "ray-prefix", "mooncake")
FREE, CERTAIN = "toll, memory free", "toll, certain"


class MemoryFree(Toll):
    """`toll` without its price of memory."""

    def parts(self, request: RequestView, fleet: FleetView, candidates: Candidates) -> CostTable:
        """Return the parts and their sum; memory costs nothing."""
        free = msgspec.structs.replace(fleet, recomputed_share=np.zeros(len(fleet.ids)))
        return super().parts(request, free, candidates)


class Certain(Toll):
    """`toll` that takes predicted lengths for certain."""

    def parts(self, request: RequestView, fleet: FleetView, candidates: Candidates) -> CostTable:
        """Return the parts and their sum, without variances."""
        return super().parts(request, msgspec.structs.replace(fleet, lengths=None), candidates)


@dataclass(frozen=True)
class Shortage:
    """Concurrent sessions, and the blocks of each worker of their fleet."""

    sessions: int
    members: str
    blocks: int

    def __str__(self) -> str:
        return f"{self.sessions} sessions, {self.members}, {self.blocks} blocks"


SHORTAGES = (
    Shortage(24, "4xboth", 12_000),
    Shortage(24, "4xboth", 8_000),
    Shortage(32, "4xboth", 12_000),
    Shortage(16, "1p+2d", 12_000),
)


def sessions(traces: Path, count: int, seed: int) -> OpenLoop:
    """Return `count` sessions that fit."""
    trace = read_cached(traces / AGENTS)
    fit = tuple(
        each
        for each in trace.sessions
        if max(turn.input + turn.output for turn in each.turns[:TURNS]) < _LONGEST
    )
    drawn = some(replace(trace, sessions=fit), count, np.random.default_rng(seed))
    cut = tuple(
        replace(s, turns=tuple(replace(t, think=t.think / 10) for t in s.turns[:TURNS]))
        for s in drawn.sessions
    )
    return from_trace(replace(drawn, sessions=cut), count)


def run(
    traces: Path, case: Shortage, name: str, seed: int, lengths: str = "mean"
) -> tuple[float, float]:
    """Return the mean seconds of a request, and the share of prompt tokens that were cached."""
    variants = {FREE: MemoryFree, CERTAIN: Certain}
    policy: RoutingPolicy = variants[name]() if name in variants else load(name)
    setup = Setup(model="llama-3.1-8b", gpu="H200", blocks=case.blocks)
    control = control_config("toll" if name in variants else name, {}, seed)
    result = Simulation(
        sessions(traces, case.sessions, seed), read_fleet(case.members), setup,
        msgspec.structs.replace(control, lengths={"predictor": lengths}), ClientConfig(), seed=seed,
        policy=policy, assess_every=1e9,
    ).run()  # fmt: skip
    prompts = sum(call.spec.prompt_tokens for call in result.done)
    cached = sum(call.cached_tokens for call in result.done)
    return float(result.document()["e2e_s"]["mean"]), cached / prompts


def rows(traces: Path, seeds: int, lengths: str) -> Iterator[str]:
    """Yield the lines of the table."""
    names = (FREE, *POLICIES) if lengths == "mean" else (FREE, "toll", CERTAIN)
    for case in SHORTAGES:
        runs = {
            name: [run(traces, case, name, seed, lengths) for seed in range(1, seeds + 1)]
            for name in names
        }
        base = [mean for mean, _ in runs[FREE]]
        for name, each in runs.items():
            means, hits = zip(*each, strict=True)
            off, low, high = paired(means, base)
            yield (
                f"{case!s:<34}{name:<20}{statistics.fmean(means):8.3f} s"
                f"{statistics.fmean(hits):8.3f}{off:+9.3f} [{low:+.3f}, {high:+.3f}]"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--lengths", choices=("mean", "online"), default="mean")
    options = parser.parse_args()
    warm_up()
    print(f"{'workload':<34}{'policy':<20}{'mean':>10}{'cached':>8}{'less memory free':>20}")
    for line in rows(options.traces, options.seeds, options.lengths):
        print(line, flush=True)


if __name__ == "__main__":
    main()
