"""The price of a late request: what raises it, what bounds it, and what it buys."""

from __future__ import annotations

import math
from collections import deque
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pigou.control.planner.price.late_price import LatePrice
from pigou.control.planner.price.terms import LATE_DECAY, LATE_HALF_LIFE_S, MAX_MARGIN

LATE_S, SECONDS, SHARE = 60.0, 5.0, 0.95


class Plant:
    """Ten workers by the model; a share `real` of what the model says is served inside."""

    def __init__(self, real: float, lag_s: float, most: float = 1.0) -> None:
        self.price = LatePrice(LATE_S, 100.0)
        self.real, self.most = real, most
        self.ready = self.supply = 10
        self._starts: deque[tuple[float, int]] = deque()
        self._planned = 0.0
        self._lag_s, self.now_s, self.bought = lag_s, 0.0, [10]

    @property
    def turns(self) -> int:
        changes = [b - a for a, b in pairwise(self.bought)]
        return sum(a * b < 0 for a, b in pairwise(changes))

    def run(self, seconds: float) -> Plant:
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s += SECONDS
            while self._starts and self._starts[0][0] <= self.now_s:
                self.ready = self._starts.popleft()[1]
            inside = min(self.real * self.ready / 10.0, 1.0) * self.most
            self.price.observe(
                100.0 * inside, 100.0, SECONDS, SHARE, self.ready, self.supply, False
            )
            if abs(self.price.margin - self._planned) > 0.05:  # as in `LoadBand`
                self._planned = self.price.margin
            wanted = math.ceil(10.0 * (1.0 + self._planned) - 1e-9)
            if wanted != self.supply:
                self.supply = wanted
                self._starts.append((self.now_s + self._lag_s, wanted))
                self.bought.append(wanted)
        return self


def test_while_the_objective_is_kept_a_late_request_costs_what_it_cost() -> None:
    plant = Plant(1.0, 100.0).run(1000.0)
    assert (plant.price.price, plant.price.reason, plant.supply) == (LATE_S, "", 10)


@settings(max_examples=40, deadline=None)
@given(real=st.floats(0.52, 0.93), lag_s=st.floats(0.0, 200.0))
def test_at_constant_load_it_buys_until_the_objective_is_kept_and_moves_ever_less(
    real: float, lag_s: float
) -> None:
    plant = Plant(real, lag_s).run(1500.0)
    assert plant.real * plant.ready / 10.0 >= SHARE - 0.03
    assert plant.turns <= 2
    turns = [plant.run(40_000.0).turns for _ in range(2)]
    assert turns[0] <= 14
    assert turns[1] - turns[0] <= 4
    enough = math.ceil(10.0 * SHARE / real)
    assert plant.supply <= 1.5 * enough + 1
    price = plant.price
    assert price.price == pytest.approx(LATE_S * math.exp(LATE_DECAY * price.margin))
    assert not price.is_out_of_reach


@pytest.mark.parametrize("most", [0.5, 0.9])
def test_an_objective_out_of_reach_buys_one_step_gives_it_back_and_says_so(most: float) -> None:
    plant = Plant(1.0, 100.0, most).run(1500.0)
    assert plant.price.is_out_of_reach
    assert "out of reach" in plant.price.reason
    assert plant.supply == 10
    assert max(plant.bought) <= 11.0 + 10.0 * math.log((1.0 - most) / 0.05) / LATE_DECAY
    assert len(plant.bought) <= 10


def test_a_kept_objective_halves_the_margin_in_an_hour() -> None:
    plant = Plant(0.8, 100.0).run(1500.0)
    before = plant.price.margin
    plant.real = 2.0
    plant.run(LATE_HALF_LIFE_S)
    assert plant.price.margin == pytest.approx(0.5 * before, rel=0.1)


def test_delay_that_the_model_explains_and_few_requests_say_nothing() -> None:
    price = LatePrice(LATE_S, 100.0)
    for _ in range(200):
        price.observe(0.0, 100.0, SECONDS, SHARE, 2, 10, True)
    assert price.late_share is None
    for _ in range(9):
        price.observe(0.0, 5.0, SECONDS, SHARE, 10, 10, False)
    assert price.price == LATE_S


def test_without_workers_to_buy_the_price_is_bounded() -> None:
    price = LatePrice(LATE_S, 100.0)
    for _ in range(2000):
        price.observe(0.0, 100.0, SECONDS, SHARE, 10, 10, False)
    assert price.margin == MAX_MARGIN
