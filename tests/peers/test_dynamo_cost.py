"""The policy `dynamo` beside the real selector of NVIDIA Dynamo, on the same loads."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.lib.dynamo_mockers import dynamo_home
from benchmarks.lib.peers import PeerMissing
from pigou.control.routing.view import Candidates, FleetView
from pigou.request import Request
from pigou_lab.routing.dynamo import Dynamo

pytestmark = [pytest.mark.dynamo, pytest.mark.timeout(120)]

SCRIPT = Path(__file__).with_name("dynamo_selections.py")
STEPS = 300


@pytest.fixture(scope="module")
def selections() -> list[dict[str, Any]]:
    """What the real one saw, and whom it chose."""
    try:
        home = dynamo_home("PIGOU_PEER_DYNAMO")
    except PeerMissing as missing:
        pytest.skip(str(missing))
    run = subprocess.run(
        [home / "bin" / "python", SCRIPT, "7", str(STEPS)],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        env={**os.environ, "DYN_LOG": "error"},
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_it_chooses_whom_dynamo_chooses(selections: list[dict[str, Any]]) -> None:
    assert len(selections) == STEPS
    decided = 0
    for seen in selections:
        workers = len(seen["overlap"])
        fleet = FleetView.of(
            workers,
            overlap=seen["overlap"],
            prefill_tokens=seen["queued"],
            decode_tokens=[16 * blocks for blocks in seen["blocks"]],
            decode_requests=seen["requests"],
        )
        alone = Candidates(np.full(workers, -1, dtype=np.int32), np.arange(workers, dtype=np.int32))
        costs = Dynamo().costs(Request("r", seen["prompt"], 1), fleet, alone)
        assert costs[seen["chosen"]] == pytest.approx(costs.min()), (seen, costs)
        decided += int(np.isclose(costs, costs.min()).sum() == 1)
    # Ties would prove nothing.
    assert decided > 0.8 * STEPS
