"""Simulated workers verify drafts by the engine's own price."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from setups import closed_loop, figures, simulation

from pigou.config import ConfigError
from pigou.engine.speculation import DraftPricer
from pigou.request import Ints
from pigou.sim.result import SimulationResult

#: A draft takes as long as a sequence more: a twentieth of a step.
LAW = "law:itl_a=0.010,itl_b=0.0005,prefill=0.004"


def run(
    users: int, speculation: str, law: str = LAW, seconds: float = 10.0, **setup: Any
) -> SimulationResult:
    limits = {"blocks": 4000, "max_seqs": 256, "max_batched_tokens": 2048, "timing": law}
    setup |= limits | {"speculation": speculation}
    return simulation(closed_loop(users, seconds), "1xboth", setup=setup).run()


def tokens_per_second(result: SimulationResult) -> float:
    document = result.document()
    return float(document["output_tok_s"])


@pytest.mark.parametrize("cost", [0.0, 0.05])
def test_a_lone_stream_is_as_much_faster_as_the_formula_says(cost: float) -> None:
    law = "law:itl_a=0.010,prefill=0.0001"
    text = f"acceptance=0.8,num_speculative_tokens=4,cost={cost}"
    document = run(1, text, law).document()
    expected = 0.010 * (1 + 5 * cost) / 3.3616
    assert document["tpot_s"]["mean"] == pytest.approx(expected, rel=0.06)
    [worker] = document["workers"]
    assert 0 < worker["accepted_tokens"] < worker["draft_tokens"]


def test_drafts_pay_at_low_load_and_go_at_high_load(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "acceptance=0.7,num_speculative_tokens=4"
    plain = {users: run(users, "", seconds=20.0) for users in (1, 16, 120)}
    priced = {users: run(users, text, seconds=20.0) for users in plain}

    def always(_: DraftPricer, rows: Ints, offers: Ints) -> Ints:
        return np.minimum(offers, 4)[: len(rows)]

    monkeypatch.setattr(DraftPricer, "choose", always)
    fixed = {users: run(users, text, seconds=20.0) for users in plain}
    speed_up = {u: tokens_per_second(priced[u]) / tokens_per_second(plain[u]) for u in plain}
    assert speed_up[1] > 1.8 > speed_up[16] > 1.0
    assert speed_up[120] > 0.98
    assert tokens_per_second(fixed[120]) < 0.9 * tokens_per_second(plain[120])
    for users, result in fixed.items():
        assert tokens_per_second(priced[users]) > 0.97 * tokens_per_second(result)


def test_a_simulation_with_drafts_repeats_itself() -> None:
    text = "acceptance=0.6,num_speculative_tokens=3,cost=0.1"
    assert figures(run(8, text)) == figures(run(8, text))


@pytest.mark.parametrize(
    ("text", "message"),
    [("acceptance=2", "must be 0 to 1"), ("num_speculative_tokens=3", "acceptance"), ("k", "k")],
)
def test_what_is_not_understood_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(1, text)
