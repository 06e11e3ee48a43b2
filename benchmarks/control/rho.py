"""A sweep over rho: what becomes of caches, and of the Price of Anarchy, as pools shrink.

    python -m benchmarks.control.rho [--only closed,open,mooncake] [--policy toll] [--seed 0]
    [--json FILE]

Simulated workers (4, Llama-3.1-8B on H200), whose pools of KV blocks go from far more than all
requests fill to fewer than the active ones want:

- `closed`: 64 users, 40 prompts of 2,048 tokens, outputs of 256.
- `open`: the same prompts, 30 a second at random.
- `mooncake`: of the first 1,200 requests of Mooncake's conversation trace those with up to 32,768
  tokens of prompt, at their times.

Columns: device blocks of a worker; rho (active over device blocks, of the fleet), its mean and most
over samples 0.25 s apart; seconds to the first evicted block, and rho then; share of prompt tokens
found in the caches; share computed although the run with the largest pool found them; PoA of the
placement (geometric mean over the games; before and after the first eviction), and the seconds that
prompts took by what was there, over the best placement (`met`); preemptions; TTFT.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.lib.peers import shared
from pigou.config import ControlConfig
from pigou.request import SECOND
from pigou.sim.client import ClientConfig
from pigou.sim.fleet_config import read_fleet
from pigou.sim.setup import Setup
from pigou.sim.simulation import UNLIMITED, Simulation
from pigou.sim.virtual_clock import EPOCH, Phase
from pigou.sim.workload import OpenLoop
from pigou.workload.trace import Trace
from pigou.workload.trace_formats import read_trace
from pigou.workload.workload_spec import WorkloadSpec, from_trace, read_workload_spec

WORKERS, LONGEST, REQUESTS = 4, 32_768, 1200
_SHAPE = "in=2048,out=256,templates=40,hold=60"
WORKLOADS = {"closed": f"closed:C=64,{_SHAPE}", "open": f"poisson:rate=30,{_SHAPE}"}
#: Device blocks of each worker, the largest first.
POOLS = {
    "closed": (32_000, 8_000, 4_000, 3_000, 2_000, 1_500, 1_000, 700, 400, 200),
    "open": (32_000, 8_000, 4_000, 3_000, 2_000, 1_500, 1_000, 700, 400, 200),
    "mooncake": (400_000, 64_000, 32_000, 16_000, 8_000, 5_000, 3_500, 2_500),
}
_SAMPLE = SECOND // 4


@dataclass(frozen=True)
class Row:
    """One run; NaN where there is no figure."""

    blocks: int
    rho_mean: float
    rho_most: float
    first_s: float
    first_rho: float
    hits: float
    recomputed: float
    poa: float
    before: float
    after: float
    met: float
    preemptions: int
    ttft_p50: float
    ttft_p99: float
    failed: int


class Sampler:
    """Notes rho, and when the first block was evicted."""

    def __init__(self, simulation: Simulation) -> None:
        self.rho: list[float] = []
        self.first = self.first_rho = math.nan
        self._simulation = simulation
        simulation.clock.at(EPOCH + _SAMPLE, Phase.PLAN, 2**50, self._sample)

    def _sample(self, now: int) -> None:
        plane = self._simulation.fleet.plane
        rho = plane.cache_monitor.status(plane.state).fleet_rho
        self.rho.append(rho)
        if math.isnan(self.first) and plane.index.removed:
            self.first, self.first_rho = (now - EPOCH) / SECOND, rho
        self._simulation.clock.at(now + _SAMPLE, Phase.PLAN, 2**50, self._sample)


def run(name: str, blocks: int, policy: str, seed: int, most: float) -> Row:
    """Simulate a workload with pools of `blocks` blocks; `most` is the share of hits of the first
    run, NaN for that run itself.
    """
    control = ControlConfig(
        policy=policy, seed=seed, max_inflight=UNLIMITED, max_inflight_tokens=UNLIMITED,
        max_queued=UNLIMITED, queue_timeout=UNLIMITED,
    )  # fmt: skip
    what = (
        read_workload_spec(WORKLOADS[name], seed)
        if name in WORKLOADS
        else WorkloadSpec(mooncake(), ClientConfig())
    )
    setup = Setup(model="llama-3.1-8b", gpu="H200", blocks=blocks)
    fleet = read_fleet(f"{WORKERS}xboth")
    simulation = Simulation(what.workload, fleet, setup, control, what.client, seed=seed)
    sampler = Sampler(simulation)
    result = simulation.run()
    found, caching = result.document(), result.caching
    games = result.placements
    hits = float(found["prefix_hit_ratio"])
    ttft = found["ttft_s"]
    return Row(
        blocks=blocks,
        rho_mean=statistics.fmean(sampler.rho),
        rho_most=max(sampler.rho),
        first_s=sampler.first,
        first_rho=sampler.first_rho,
        hits=hits,
        recomputed=0.0 if math.isnan(most) else most - hits,
        poa=_number(found["poa"]["caching"]),
        before=_number(caching["poa_before_eviction"]),
        after=_number(caching["poa_after_eviction"]),
        met=statistics.geometric_mean(each.met / each.best for each in games)
        if games
        else math.nan,
        preemptions=found["preemptions"],
        ttft_p50=_number(ttft["p50"]),
        ttft_p99=_number(ttft["p99"]),
        failed=found["failed"],
    )


@lru_cache(maxsize=1)
def mooncake() -> OpenLoop:
    """Return the trace's first requests, without the longest."""
    trace = read_trace(shared() / "traces" / "mooncake" / "conversation_trace.jsonl.zst")
    kept = [
        each for each in trace.sessions[:REQUESTS] if max(t.input for t in each.turns) <= LONGEST
    ]
    return from_trace(Trace(trace.block, tuple(kept)))


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def sweep(name: str, policy: str, seed: int) -> list[Row]:
    """Return a row for each pool."""
    rows: list[Row] = []
    for blocks in POOLS[name]:
        rows.append(run(name, blocks, policy, seed, rows[0].hits if rows else math.nan))
    return rows


def table(name: str, rows: list[Row]) -> Table:
    """Return a sweep for reading."""
    made = Table(
        "blocks", "rho mean", "rho most", "first, s", "rho then", "hits", "recomputed",
        "PoA", "before", "after", "met/best", "preempted", "TTFT p50", "p99", "failed", title=name,
    )  # fmt: skip
    for each in rows:
        made.add_row(
            f"{each.blocks:,}", f"{each.rho_mean:.2f}", f"{each.rho_most:.2f}",
            f"{each.first_s:.1f}", f"{each.first_rho:.2f}", f"{each.hits:.1%}",
            f"{each.recomputed:.1%}", f"{each.poa:.3f}", f"{each.before:.3f}", f"{each.after:.3f}",
            f"{each.met:.3f}", f"{each.preemptions:,}", f"{each.ttft_p50:.3f}",
            f"{each.ttft_p99:.3f}", str(each.failed),
        )  # fmt: skip
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default=",".join(POOLS), help="workloads, joined by commas")
    parser.add_argument("--policy", default="toll")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="file for the rows")
    options = parser.parse_args()
    names = options.only.split(",")
    for name in names:
        if name not in POOLS:
            parser.error(f"--only is {options.only!r}; it may name: {', '.join(POOLS)}")
    console, found = Console(width=170), {}
    for name in names:
        found[name] = sweep(name, options.policy, options.seed)
        console.print(table(name, found[name]))
    if options.json:
        rows = {name: [asdict(row) for row in rows] for name, rows in found.items()}
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
