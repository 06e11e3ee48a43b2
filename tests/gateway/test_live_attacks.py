"""Laws of benchmarks/live/attacks.py, against a gateway over stubs."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from stub import Stub, serving

from benchmarks.live import attacks
from pigou.config import ControlConfig
from pigou.gateway.auth.keys import Keys


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    path = tmp_path / "keys.json"
    path.write_text(attacks.keys_file())
    return Keys.read(path)


def test_only_the_paid_names_of_the_attacker_share_a_payer(keys: Keys) -> None:
    payers = {key.tenant: key.payer or key.tenant for key in keys}
    assert {payers[f"y{number}"] for number in range(attacks.SYBILS)} == {"x"}
    assert len({payers[f"x{number}"] for number in range(attacks.SYBILS)}) == attacks.SYBILS


@pytest.mark.parametrize("play", ["honest", "cost-bomb", "sybil-paid"])
async def test_a_play_serves_victims_and_counts_the_attackers_jobs(keys: Keys, play: str) -> None:
    control = ControlConfig(admission={"order": "fair"})
    args = argparse.Namespace(seed=1, seconds=0.5, rate=20.0, open=2)
    async with serving(Stub("a"), keys=keys, control=control) as fleet:
        figures = await attacks.play_once(fleet.url, play, args)
    assert len(figures.ttfts) > 0
    assert (figures.tokens > 0) is (play != "cost-bomb")
    assert figures.attempts > 0
