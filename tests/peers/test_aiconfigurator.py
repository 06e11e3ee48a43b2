"""Choices of AIConfigurator as fleets; PIGOU_PEER_AICONFIGURATOR names its venv."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.capacity.beside_aiconfigurator import cases, peer_choices, peer_configurations
from benchmarks.lib.peers import PeerMissing, aiconfigurator_home
from pigou.capacity.plan.demand import read_demand

SHARED = {"num_total_gpus": "4", "tp": "4", "bs": "16", "num_tokens": "4015.0"}
APART = {
    "num_total_gpus": "32", "(p)tp": "4", "(p)workers": "5", "(p)bs": "1", "(d)tp": "4",
    "(d)workers": "3", "(d)bs": "64",
}  # fmt: skip


def test_a_choice_runs_with_its_own_batch_and_with_that_of_vllm() -> None:
    demand = read_demand("mix=1:400/50", 0)
    shared, apart = (peer_configurations(row, demand) for row in (SHARED, APART))
    assert [made.name for made in (*shared, *apart)] == ["8xboth"] * 2 + ["5p+3d"] * 2
    assert [made.batch["both"] for made in shared] == [16, 256]
    assert [made.batch["decode"] for made in apart] == [64, 256]
    assert all(made.total_gpus == 32 for made in (*shared, *apart))
    (grown,) = peer_configurations({**SHARED, "replicas_needed": "3"}, demand)[:1]
    assert grown.total_gpus == 12


@pytest.mark.slow
@pytest.mark.aiconfigurator
def test_the_peer_finds_fleets_for_its_own_example(tmp_path: Path) -> None:
    try:
        aiconfigurator_home()
    except PeerMissing as missing:
        pytest.skip(str(missing))
    case = cases()["example"]
    made, seconds, _ = peer_choices(case, read_demand(case.workload, 0), tmp_path)
    assert {len(one.pools) for one in made} == {1, 2}
    assert all(one.total_gpus <= 32 for one in made)
    assert seconds > 0
