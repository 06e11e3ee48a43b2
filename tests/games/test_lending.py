"""Lending over rounds: no lie on a grid pays, slices bound what is lost, and everything is used."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from pigou.games import Floats
from pigou.games.lending import flexible_lending, t_period_lending

GRID = (0.0, 0.5, 2.0, 3.0)
RULES: dict[str, Callable[[Any], Floats]] = {
    "flexible": flexible_lending,
    "T = 1": partial(t_period_lending, period=1),
    "T = 2": partial(t_period_lending, period=2),
}


def worth(given: Floats, demand: Floats, beyond: float) -> float:
    """Return utility; units beyond the demand are worth `beyond`."""
    within = np.minimum(given, demand)
    return float((within + beyond * (given - within)).sum())


@pytest.mark.parametrize("name", RULES)
def test_no_lie_pays_and_slices_are_worth_no_more(name: str) -> None:
    rng, rule = np.random.default_rng(3), RULES[name]
    for beyond in (0.0, 0.4, 0.0):
        true = rng.choice(GRID, (4, 3))
        given = rule(true)
        assert given.sum(axis=1) == pytest.approx([3.0] * 4)
        assert given.sum(axis=0) == pytest.approx([4.0] * 3)  # what is lent is paid back
        honest = worth(given[:, 0], true[:, 0], beyond)
        least = 0.5 if name == "flexible" else 1.0
        assert honest >= least * worth(np.ones(4), true[:, 0], beyond) - 1e-9
        for lie in itertools.product(GRID, repeat=4):
            report = true.copy()
            report[:, 0] = lie
            assert worth(rule(report)[:, 0], true[:, 0], beyond) <= honest + 1e-9


def test_units_are_lent_and_paid_back_by_hand() -> None:
    flexible = flexible_lending([[2, 0], [2, 2], [2, 2]])
    assert flexible == pytest.approx(np.array([[2, 0], [1, 1], [0, 2]]))
    owners = flexible_lending([[4, 0], [4, 4]], endowments=[1, 3])
    assert owners == pytest.approx(np.array([[2, 2], [0, 4]]))  # 2 units are all the first owns
    settled = t_period_lending([[2, 0], [2, 2], [1, 3], [3, 0]], period=2)
    assert settled == pytest.approx(np.array([[2, 0], [1, 1], [0.5, 1.5], [0.5, 1.5]]))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: flexible_lending([[1, -1]]), r"demands\[0, 1\] is -1"),
        (lambda: flexible_lending([[1, 1]], [1, 1, 1]), r"endowments has shape \(3,\)"),
        (lambda: t_period_lending([[1], [1], [1]], 1), "a multiple of 2 rounds"),
        (lambda: t_period_lending([[1], [1]], 0), "period is 0"),
    ],
)
def test_what_cannot_be_lent_is_refused_by_its_name(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
