"""The planner `dynamo` beside Dynamo's own planner, on the same windows of a changing fleet.

PIGOU_PEER_DYNAMO names an environment with Dynamo's planner (`benchmarks.control.planner`).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.control.planner.fluid_fleet import FluidFleet, FluidPool

from benchmarks.control.planner.dynamo_peer import DynamoPeer, planner_python
from benchmarks.lib.peers import PeerMissing
from pigou.control.planner.messages import PlannerDecision
from pigou.control.planner.planner import PlannerSetup
from pigou.games.latency import LatencyLaw
from pigou.objectives import Budget, ProvisioningTimes, Slo
from pigou.performance.model import PerformanceModel
from pigou.performance.speed import DecodeLaw, PrefillLine, RequestMix
from pigou.request import SECOND, Role
from pigou_lab.planner.dynamo import DynamoPlanner, DynamoPlannerParams

pytestmark = [pytest.mark.dynamo, pytest.mark.timeout(120)]

TIMES = ProvisioningTimes(start_up_s=30, drain_s=5)
SPEED = PerformanceModel(
    PrefillLine(0.004, 0.00008, 1e-9), DecodeLaw(LatencyLaw(0.0004, 0.008), 1e-7, 1000.0),
    kv_tokens=400_000.0, max_seqs=128,
)  # fmt: skip
LOADS: dict[str, Callable[[float], float]] = {
    "steady": lambda t: 8.0,
    "steps": lambda t: 4.0 if t < 300 else 16.0 if t < 900 else 3.0,
    "burst": lambda t: (15.0, 2.0, 10.0, 15.0, 5.0, 2.0)[int(t / 150) % 6],
    "pause": lambda t: 0.0 if 400 < t < 800 else 12.0,
}


@pytest.fixture(autouse=True)
def _peer() -> None:
    try:
        planner_python()
    except PeerMissing as missing:
        pytest.skip(str(missing))


class Both:
    """Both planners on the same windows; the peer's decisions are carried out."""

    name = "both"

    def __init__(self, ours: DynamoPlanner, peer: DynamoPeer) -> None:
        self.ours, self.peer = ours, peer
        self.pairs: list[tuple[PlannerDecision, PlannerDecision]] = []

    def observe(self, window: object) -> None:
        self.ours.observe(window)  # type: ignore[arg-type]
        self.peer.observe(window)  # type: ignore[arg-type]

    def tick(self, now_ns: int) -> PlannerDecision:
        self.pairs.append((self.ours.tick(now_ns), self.peer.tick(now_ns)))
        return self.pairs[-1][1]


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("split", [True, False], ids=["disaggregated", "aggregated"])
def test_every_action_is_dynamos(load: str, split: bool) -> None:
    pools = {"p": FluidPool(Role.PREFILL, performance=SPEED),
             "d": FluidPool(Role.DECODE, performance=SPEED)}  # fmt: skip
    counts = {"p": 2, "d": 2}
    if not split:
        pools, counts = {"b": FluidPool(Role.BOTH, performance=SPEED)}, {"b": 3}
    setup = PlannerSetup(
        slo=Slo(ttft_s=0.5, itl_s=0.03), budget=Budget(max_gpus=8), times=TIMES,
        performance=dict.fromkeys(pools, SPEED),
    )  # fmt: skip
    params = DynamoPlannerParams()
    with DynamoPeer(setup, params) as peer:
        both = Both(DynamoPlanner(setup, params), peer)
        fleet = FluidFleet(
            pools, counts, {"": LOADS[load]}, TIMES,
            mix=lambda t, model: RequestMix(isl=1500, osl=150), seed=3,
        )  # fmt: skip
        fleet.run(both, 1500)  # type: ignore[arg-type]
    differ = [
        (ours.now_ns / SECOND, ours.actions, theirs.actions)
        for ours, theirs in both.pairs
        if ours.actions != theirs.actions
    ]
    assert len(both.pairs) == 300
    assert not differ
    assert any(theirs.actions for _, theirs in both.pairs) or load == "steady"
