"""The Price of Anarchy in light and heavy traffic: closed forms and limits."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pigou.config import ConfigError
from pigou.games.latency import LatencyLaw
from pigou_lab.games.nonatomic import marginal
from pigou_lab.games.traffic import PoleLaw, heavy_limit, price_at, swinging


def queues(*rates: float) -> list[PoleLaw]:
    return [PoleLaw(0, 0, 1, rate) for rate in rates]


@pytest.mark.parametrize("rates", [(9.0, 1.0), (16.0, 9.0, 1.0), (5.0, 4.0)])
@pytest.mark.parametrize("share", [0.95, 0.99, 0.9999])
def test_queues_cost_what_bell_and_stidham_say(rates: tuple[float, ...], share: float) -> None:
    """With all in use: m x / (sum mu - x) selfishly, (sum sqrt mu)^2 / (sum mu - x) - m at best."""
    load, slack = share * sum(rates), (1 - share) * sum(rates)
    selfish = len(rates) * load / slack
    best = sum(map(math.sqrt, rates)) ** 2 / slack - len(rates)
    assert price_at(queues(*rates), load) == pytest.approx(selfish / best, rel=1e-6)


@pytest.mark.parametrize(
    ("laws", "limit"),
    [
        (queues(9, 1), 5 / 4),
        (queues(16, 9, 1), 39 / 32),
        (queues(7, 7, 7), 1),
        ([PoleLaw(0.005, 0.02, 0.01, n, 2) for n in (64, 32)], None),
        ([PoleLaw(0.005, 0.02, 0.04, 64, 2), PoleLaw(0.005, 0.02, 0.01, 32, 2)], 1),
        ([PoleLaw(0.1, 0, 2, 10, 0.5), PoleLaw(0, 3, 1, 40, 0.5)], None),
    ],
)
def test_heavy_traffic_has_the_limit_of_the_closed_form(
    laws: list[PoleLaw], limit: float | None
) -> None:
    known = heavy_limit(laws)
    assert 1 - 1e-12 <= known <= len(laws)
    if limit is not None:
        assert known == pytest.approx(limit)
    load = sum(law.n_sat for law in laws) * (1 - 1e-8)
    assert price_at(laws, load) == pytest.approx(known, rel=2e-3)


@pytest.mark.parametrize("seed", range(10))
def test_the_limit_is_1_just_where_poles_are_in_proportion(seed: int) -> None:
    rng = np.random.default_rng(seed)
    beta, n_sat = float(rng.uniform(0.5, 3)), rng.uniform(5, 50, 3)
    fit = [PoleLaw(0, 0, float((n / 10) ** beta), float(n), beta) for n in n_sat]
    assert heavy_limit(fit) == pytest.approx(1)
    assert heavy_limit([*fit[:2], PoleLaw(0, 0, 50.0, float(n_sat[2]), beta)]) > 1.0001


@pytest.mark.parametrize(
    "laws",
    [queues(9, 1), [PoleLaw(0.005, 0.02, 0.01, n, 2) for n in (64, 32)], queues(4, 4)],
)
def test_light_traffic_has_the_limit_1(laws: list[PoleLaw]) -> None:
    capacity = sum(law.n_sat for law in laws)
    assert price_at(laws, 1e-6 * capacity) == pytest.approx(1, abs=1e-6)


def test_polynomials_lose_most_in_between() -> None:
    """Pigou's network has 4/3 at a demand of 1, and nothing at both ends."""
    costs = [lambda x: 1.0 + 0.0 * x, lambda x: x]
    assert price_at(costs, 1.0) == pytest.approx(4 / 3)
    assert price_at(costs, 1e-3) == pytest.approx(1)
    assert price_at(costs, 1e3) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("load", [0.3, 1.0, 3.0])
def test_a_cost_that_swings_has_no_limit(load: float) -> None:
    """The price repeats with the logarithm of the load, and is not 1 all through."""
    period = math.exp(2 * math.pi)
    prices = [price_at([swinging, float], load * period**k) for k in (-2, -1, 0, 1, 2)]
    assert prices == pytest.approx([prices[0]] * 5, rel=1e-6)
    assert max(price_at([swinging, float], x) for x in (0.1, 0.3, 1.0)) > 1.01


def test_the_pole_law_is_the_latency_law_away_from_its_floor() -> None:
    own, other = PoleLaw(0.005, 0.02, 0.01, 64, 2), LatencyLaw(0.005, 0.02, 0.01, 64, 2)
    for n in (0.0, 10.0, 62.5):
        assert own(n) == pytest.approx(other(n))
        assert own.marginal(n) == pytest.approx(marginal(other, n), rel=1e-3)
    assert own(64.0) == own.marginal(65.0) == math.inf


def test_wrong_laws_are_refused() -> None:
    with pytest.raises(ConfigError, match="n_sat is 0"):
        PoleLaw(0, 0, 1, 0)
    with pytest.raises(ValueError, match="one beta of all workers"):
        heavy_limit([PoleLaw(0, 0, 1, 2, 1), PoleLaw(0, 0, 1, 2, 2)])
    with pytest.raises(ValueError, match="no finite cost carries"):
        price_at(queues(1, 1), 2.5)
