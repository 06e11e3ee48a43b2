"""Which tier prefix hits come from, by load: G1 device, G2 host, G3 disk, G4 object store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pigou.sim.client import ClientConfig
from pigou.sim.fleet_config import read_fleet
from pigou.sim.setup import Setup, TierConfig
from pigou.sim.simulation import Simulation, unlimited
from pigou.sim.workload import ClosedLoop, RequestLengths
from pigou_lab.experiments.fleets import PaperFleet, Reading
from pigou_lab.experiments.results import COMPARED, Row, over_seeds, run_simulation

#: Users of the closed loop, and its seconds.
LEVELS, RAMP_S, HOLD_S = (1, 4, 16, 64), 5.0, 60.0
#: Prompts of which each user draws one: 200, together eight times the device's cache.
LENGTHS = RequestLengths(input=(1024, 1024), output=(64, 64), templates=200)
#: A device of 25 prompts, hosts of 32, disks of 64, an object store of all.
SETUP = Setup(
    model="llama-3.1-8b", gpu="H100", blocks=1600,
    tiers=(TierConfig(name="host", gib=4), TierConfig(name="disk", gib=8),
           TierConfig(name="bucket", gib=32)),
)  # fmt: skip
TIERS = ("G1", "G2", "G3", "G4")


def tiers(_: PaperFleet, __: Reading, seeds: Sequence[int], levels: Sequence[int]) -> Iterator[Row]:
    """Yield a row for each number of users: hits of prompt tokens, and the share of each tier."""
    for users in levels:
        figures: dict[str, list[float | None]] = {}
        runs = []
        for seed in seeds:
            run = _figures(users, seed)
            runs.append({"seed": seed, **run})
            for name, value in run.items():
                figures.setdefault(name, []).append(value)
        row: Row = {"experiment": "tiers", "concurrency": users, **over_seeds(figures)}
        yield dict.fromkeys(COMPARED) | row | {"runs": runs}


def _figures(users: int, seed: int) -> dict[str, float | None]:
    loop = ClosedLoop(lengths=LENGTHS, phases=((users, HOLD_S),), ramp=RAMP_S)
    simulation = Simulation(
        loop, read_fleet("1xboth"), SETUP, unlimited(seed=seed), ClientConfig(), seed=seed
    )
    document = run_simulation(simulation, users=users, seed=seed).document()
    hits = document["tier_hits"]
    return {
        "ttft_p99_s": document["ttft_s"]["p99"], "itl_p99_s": document["itl_s"]["p99"],
        "rps": document["throughput_rps"], "hits": document["prefix_hit_ratio"],
        **{f"{tier}_share": hits[tier]["share"] for tier in TIERS},
        **{f"{tier}_gib": hits[tier]["bytes"] / 2**30 for tier in TIERS},
    }  # fmt: skip


def verdict(rows: Sequence[Row]) -> Mapping[str, Any]:
    """Return the device's share of hits at the least and at the most load."""
    return {f"G1_share_at_{row['concurrency']}": row["G1_share"] for row in (rows[0], rows[-1])}
