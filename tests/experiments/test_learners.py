"""Tenants that learn: tolls keep a fleet stable near capacity, latency alone does not."""

from __future__ import annotations

import pytest

from pigou_lab.experiments.learners import CONTENDERS, figures, simulate, verdict


def test_quoted_tolls_keep_the_backlog_of_learners_down() -> None:
    backlog = {
        contender: figures(simulate(contender, 50.0, 5.0, 21), 5.0)["backlog"]
        for contender in ("own", "tolls")
    }
    assert backlog["tolls"] < 0.5 * backlog["own"]


def test_a_contender_is_stable_from_the_factor_above_which_it_always_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pigou_lab.experiments.learners.capacity_rps", lambda: 60.0)
    stable = {100: False, 110: True, 150: False, 200: True, 220: True}
    rows = [
        {"contender": contender, "concurrency": level, "stable": flag, "growth": 0.1}
        for level, flag in stable.items()
        for contender in CONTENDERS
    ]
    assert verdict(rows)["stable_from"] == dict.fromkeys(CONTENDERS, 2.0)
