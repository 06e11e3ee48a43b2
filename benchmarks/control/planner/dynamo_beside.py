"""Dynamo's own planner, ours of its published rule, and `price`, on the same simulated fleets.

python -m benchmarks.control.planner.dynamo_beside [--fleet 1p+1d] [--hours 1] [--seeds 2]

PIGOU_PEER_DYNAMO names an environment with Dynamo's planner; without it the peer is left out, and
the reason is printed. `same` is the share of ticks on which `dynamo` would have done what the
peer did, on the peer's own windows.
"""

from __future__ import annotations

import argparse
from typing import ClassVar, NamedTuple

import msgspec

from benchmarks.control.planner.dynamo_peer import PREDICTORS, DynamoPeer, planner_python
from benchmarks.lib.peers import PeerMissing
from pigou.config import ControlConfig
from pigou.control.planner.messages import PlannerDecision
from pigou.control.planner.planner import Planner, PlannerSetup
from pigou.sim.fleet_config import ScalingConfig, read_fleet
from pigou.sim.scaling import PlannedFleet, Scaling, planner_setup, with_start_up
from pigou.sim.setup import Setup
from pigou.sim.simulation import UNLIMITED, Simulation
from pigou.windows.planner_window import PlannerWindow
from pigou.workload.workload_spec import read_workload_spec
from pigou_lab.planner.dynamo import DynamoPlanner, DynamoPlannerParams

FLEETS = ("1p+1d", "2xboth")
#: Rates by a share of an hour, in requests a second.
LOADS = {
    "constant": "8@0",
    "step": "4@0/14@0.25/4@0.75",
    "burst": "15@0/2@0.17/10@0.33/15@0.5/5@0.67/2@0.83",
    "day": "2@0/4@0.1/8@0.2/12@0.3/14@0.45/12@0.6/7@0.75/3@0.9",
}
LENGTHS = "in=1000:3000,out=100:300"
#: A worker serves about 8 prompts a second, or 10 streams of 200 tokens.
TIMING = "law:itl_a=0.008,itl_b=0.0003,prefill=0.005,prefill_token=0.00006"
PREDICTOR = DynamoPlannerParams().predictor
SLO, START_UP_S, MAX_WORKERS = "ttft=0.5,itl=0.02", 100.0, 16


class Row(NamedTuple):
    """One run's figures."""

    attained: float
    gpu_hours: float
    moves: int
    reversals: int
    same: float | None


class Shadowed:
    """The peer decides; ours is asked the same, and how often it agrees is counted."""

    name: ClassVar[str] = DynamoPeer.name
    Params: ClassVar[type[msgspec.Struct]] = DynamoPlannerParams

    def __init__(self, peer: DynamoPeer, ours: DynamoPlanner) -> None:
        self._peer, self._ours = peer, ours
        self.ticks = self.agreed = 0

    def observe(self, window: PlannerWindow) -> None:
        """Let both see a window."""
        self._peer.observe(window)
        self._ours.observe(window)

    def tick(self, now_ns: int) -> PlannerDecision:
        """Return what the peer does."""
        theirs, ours = self._peer.tick(now_ns), self._ours.tick(now_ns)
        self.ticks += 1
        self.agreed += theirs.actions == ours.actions
        return theirs


def simulate(
    fleet: str, load: str, hours: float, seed: int, planner: str, predictor: str = PREDICTOR
) -> Row:
    """Run one planner on one load; `dynamo-peer` is the peer. `price` has no `predictor`."""
    seconds = 3600.0 * hours
    rates = "/".join(
        f"{rate}@{float(at) * seconds:g}"
        for rate, _, at in (part.partition("@") for part in LOADS[load].split("/"))
    )
    what = read_workload_spec(f"poisson:rate={rates},{LENGTHS},hold={seconds:g}", seed)
    config = ScalingConfig(
        slo=SLO,
        planner={"planner": planner.removesuffix("-peer")}
        | ({"predictor": predictor} if planner.startswith("dynamo") else {}),
        max_workers=MAX_WORKERS,
        start_up=START_UP_S,
    )
    control = ControlConfig(
        policy="toll", seed=seed, max_inflight=UNLIMITED, max_inflight_tokens=UNLIMITED,
        max_queued=UNLIMITED, queue_timeout=UNLIMITED,
    )  # fmt: skip
    members = with_start_up(read_fleet(fleet), config)
    simulation = Simulation(
        what.workload, members, Setup(timing=TIMING, blocks=20_000), control, what.client,
        seed=seed, scaling=ScalingConfig(slo=SLO) if planner == "dynamo-peer" else config,
    )  # fmt: skip
    if planner != "dynamo-peer":
        return _row(simulation, None)
    planned = PlannedFleet("", simulation.config, simulation.membership)
    setup: PlannerSetup = planner_setup(config, simulation.objectives, (planned,), seed)
    params = DynamoPlannerParams(predictor=predictor)
    with DynamoPeer(setup, params) as peer:
        both = Shadowed(peer, DynamoPlanner(setup, params))
        driven: Planner = both
        simulation.scaling = Scaling(
            driven, (simulation.scaled_fleet(""),), simulation.clock, config
        )
        return _row(simulation, both)


def _row(simulation: Simulation, both: Shadowed | None) -> Row:
    document = simulation.run().document()
    figures = document["planner"]
    return Row(
        document["slo"]["attained"],
        figures["gpu_hours"],
        figures["moves"],
        figures["reversals"],
        None if both is None else both.agreed / both.ticks,
    )


def main() -> None:
    """Print a table, means over the seeds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--fleet", choices=FLEETS, help="one alone")
    parser.add_argument("--load", choices=LOADS, help="one alone")
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--planners", default="price,dynamo,dynamo-peer")
    parser.add_argument("--predictor", default=PREDICTOR, choices=PREDICTORS, help="of Dynamo's")
    parser.add_argument("--json", default="", help="file for all figures")
    options = parser.parse_args()
    planners = options.planners.split(",")
    try:
        planner_python()
    except PeerMissing as missing:
        print(f"without the peer: {missing}")
        planners = [name for name in planners if name != "dynamo-peer"]
    print("| fleet | load | planner | attained | GPU-hours | moves | reversals | same |")
    print("|---|---|---|---|---|---|---|---|")
    cells = []
    for fleet in [options.fleet] if options.fleet else FLEETS:
        for load in [options.load] if options.load else LOADS:
            for planner in planners:
                rows = [
                    simulate(fleet, load, options.hours, seed, planner, options.predictor)
                    for seed in range(options.seeds)
                ]
                means = [sum(column) / len(rows) for column in list(zip(*rows, strict=True))[:4]]
                same = [row.same for row in rows if row.same is not None]
                share = f"{sum(same) / len(same):.1%}" if same else ""
                print(
                    f"| {fleet} | {load} | `{planner}` | {means[0]:.3f} | {means[1]:.2f} "
                    f"| {means[2]:.1f} | {means[3]:.1f} | {share} |",
                    flush=True,
                )
                cells += [
                    {"fleet": fleet, "load": load, "planner": planner, **row._asdict()}
                    for row in rows
                ]
    if options.json:
        with open(options.json, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(cells)))


if __name__ == "__main__":
    main()
