"""The audit over periods finds what is known of rules and orders, and no more."""

from __future__ import annotations

import numpy as np
import pytest

from pigou_lab.games.sharing_periods import KNOWN, RULES, period_row


def test_the_known_lie_under_dynamic_max_min_is_the_best_on_its_grid() -> None:
    row = period_row("dynamic_max_min", 1, 0)
    assert row["strategy_proof"] == pytest.approx(0.08)
    assert row["best_lie"] == "8%: (0.0, 0.5, 0.75)"


def test_under_karma_lies_pay_who_knows_the_future_alone() -> None:
    for name in ("karma", "karma, alpha 0"):
        row = period_row(name, 30, 1)
        assert row["strategy_proof"] > 0.05
        assert row["online_strategy_proof"] <= 0.0


def test_lending_pays_no_lie_and_idles() -> None:
    for name in ("flexible_lending", "t_period_lending"):
        row = period_row(name, 30, 0)
        assert (
            max(row["strategy_proof"], row["online_strategy_proof"], row["sharing_incentive"])
            <= 1e-6
        )
        assert row["efficient"] > 0.1


def test_orders_on_a_server_are_the_rules_that_they_follow() -> None:
    for order, rule in (("order fair (VTC)", "dynamic_max_min"), ("order karma", "karma")):
        given = RULES[order](KNOWN)
        assert np.abs(given - RULES[rule](KNOWN)).max() <= 1.0  # whole units
    flood = period_row("order fcfs", 1, 0)
    assert (
        min(flood[key] for key in ("sharing_incentive", "strategy_proof", "online_strategy_proof"))
        > 0.05
    )
    fair = period_row("order fair (VTC), credit=0", 1, 0)
    assert max(fair[key] for key in ("sharing_incentive", "envy_free", "strategy_proof")) <= 1e-6
