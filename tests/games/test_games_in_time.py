"""Queues of learners, repeated and linear-quadratic games, late planners; known answers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from pigou.games.lq_game import lq_nash, lq_planner, lq_price_of_anarchy
from pigou.games.repeated import (
    discounted,
    grim_trigger_delta,
    lagged_integrator_stable,
    patience_delta,
    plus_minus_one,
)
from pigou.games.strategic_queues import (
    PATIENT_FACTOR,
    Learners,
    capacity_factor,
    simulate_queues,
    uniform_service_rate,
)
from pigou_lab.games.sharing import CLASSIC, MECHANISMS, audit, known_answers, violations


@pytest.mark.parametrize(("queues", "rate"), [(1, 1), (2, 0.75), (3, 0.703704), (4, 0.683594)])
def test_backlogged_queues_that_choose_at_random_are_served_as_known(
    queues: int, rate: float
) -> None:
    assert uniform_service_rate(queues, queues) == pytest.approx(rate, abs=1e-6)
    run = simulate_queues([1.0] * queues, [1.0] * queues, steps=1500, strategy="uniform")
    assert run.served.mean() == pytest.approx(rate, abs=0.015)


def test_random_choice_needs_a_larger_factor_than_learning_does() -> None:
    assert pytest.approx(math.e / (math.e - 1)) == PATIENT_FACTOR
    assert capacity_factor([0.9] * 3, [1.0] * 3) == pytest.approx(1 / 0.9)
    assert capacity_factor([0.6, 0.1], [0.5, 0.5]) == pytest.approx(5 / 6)  # one queue, one server
    assert capacity_factor([0.3] * 4, [1]) == pytest.approx(1 / 1.2)
    assert capacity_factor([0.0], [1]) == math.inf
    loads = [0.8] * 3
    assert not simulate_queues(loads, [1.0] * 3, steps=1500, strategy="uniform").stable()
    for strategy in ("exp3", "hedge"):
        assert simulate_queues(loads, [1.0] * 3, steps=1500, strategy=strategy).stable()
    assert not simulate_queues([1.0] * 3, [0.9] * 3, steps=1500, strategy="hedge").stable()


def test_no_packet_is_lost_with_buffers_or_without() -> None:
    for buffers in (0, 2):
        run = simulate_queues([1.0, 1.0], [0.5], steps=400, priority="random", buffers=buffers)
        assert run.backlog.sum() + 400 * run.served.sum() == pytest.approx(800)


def test_a_learner_finds_the_best_arm_and_follows_when_it_changes() -> None:
    learners, rng = Learners(1, 3, rate=0.2, explore=0.05, share=0.01), np.random.default_rng(0)
    for best in (0, 2):
        for _ in range(600):
            chances = learners.chances(0)
            arm = int(rng.choice(3, p=chances))
            losses = np.zeros(3)
            losses[arm] = (arm != best) / chances[arm]
            learners.learn(losses, 0)
        assert learners.chances(0).argmax() == best


def test_the_lq_game_of_two_has_the_known_price() -> None:
    nash, planner = lq_nash([1, 1], [1, 1]), lq_planner([1, 1], [1, 1])
    assert nash.costs == pytest.approx([1 / math.sqrt(3)] * 2)
    assert (nash.total, planner.total) == (pytest.approx(1.154701, abs=1e-6), pytest.approx(1))
    assert lq_price_of_anarchy([1, 1], [1, 1]) == pytest.approx(1.154701, abs=1e-6)
    for a, b, q, r in ((0.3, 2.0, 1.5, 0.7), (3.0, 1.0, 1.0, 1.0), (-2.0, 1.0, 2.0, 3.0)):
        p = (2 * a + math.sqrt(4 * a * a + 12 * b * b * q / r)) / (6 * b * b / r)
        best = (2 * a + math.sqrt(4 * a * a + 16 * b * b * q / r)) / (4 * b * b / r)
        assert lq_nash([q, q], [r, r], a=a, b=b).costs == pytest.approx([p, p])
        assert lq_planner([q, q], [r, r], a=a, b=b).total == pytest.approx(best)


def test_no_player_of_an_lq_equilibrium_gains_by_another_feedback() -> None:
    q, r, b, a, d = np.array([1.0, 3.0, 0.5]), np.array([1.0, 2.0, 4.0]), 1.5, 0.2, 0.1
    nash = lq_nash(q, r, a=a, b=b, discount=d)
    for i in range(3):
        others = nash.rate - b * nash.efforts[i]
        tried = nash.efforts[i] * np.array([0.8, 0.99, 1.0, 1.01, 1.2])
        costs = (q[i] + r[i] * tried**2) / (2 * (others + b * tried) + d)
        assert costs.argmin() == 2
        assert costs[2] == pytest.approx(nash.costs[i])
    assert lq_price_of_anarchy([1.0], [1.0], a=1.0) == pytest.approx(1)


def test_lq_games_of_unlike_players_by_an_independent_iteration() -> None:
    """Each answers the others by its own Riccati equation until nobody moves."""
    rng = np.random.default_rng(8)
    for _ in range(10):
        n, a, d = int(rng.integers(1, 6)), float(rng.uniform(-1, 1)), float(rng.choice([0, 0.3]))
        q, r, b = rng.uniform(0.1, 4, n), rng.uniform(0.1, 4, n), rng.uniform(0.5, 2, n)
        q[-1] = 0.0 if n > 1 else q[-1]  # who does not mind the backlog makes no effort
        s, p = b * b / r, np.ones(n)
        for _ in range(1000):
            for i in range(n):
                rest = a - d / 2 - (s @ p - s[i] * p[i])
                p[i] = 0.5 * p[i] + 0.5 * (rest + math.sqrt(rest**2 + s[i] * q[i])) / s[i]
        assert lq_nash(q, r, a=a, b=b, discount=d).costs == pytest.approx(p, rel=1e-6, abs=1e-9)


def test_grim_trigger_sustains_from_the_known_patience() -> None:
    assert grim_trigger_delta(5, 3, 1) == 0.5
    assert grim_trigger_delta(2, 3, 1) == 0.0
    for delta, pays in ((0.4, False), (0.6, True)):
        assert (discounted([3], delta) >= discounted([5, 1], delta)) == pays
    assert patience_delta(1, 1 / math.log(2)) == pytest.approx(0.5)


def test_a_planner_that_answers_late_overshoots_by_its_lag_and_turns_for_ever() -> None:
    prompt = plus_minus_one(6, 3, 0, 20)
    assert (prompt.overshoot, prompt.sign_changes, prompt.settled) == (0, 0, 2)
    for lag in (1, 3):
        late = plus_minus_one(6, 3, lag, 80)
        assert late.overshoot == lag
        assert late.sign_changes > 5
        assert late.settled is None
    assert lagged_integrator_stable(1.0, 1.57)
    assert not lagged_integrator_stable(1.0, 1.58)


def test_the_audit_finds_what_is_known_of_each_mechanism() -> None:
    made = {name: audit(name, 6, 0) for name in ("drf", "ceei", "asset_fair")}
    told: dict[float, str] = {}
    audit("ceei", 2, 0, told)
    assert max(told) == pytest.approx(made["ceei"]["strategy_proof"] or 0, abs=0.2)
    assert {key for key, value in made["drf"].items() if value} == {"sybil_proof"}
    assert made["ceei"]["strategy_proof"]
    assert made["asset_fair"]["sharing_incentive"]
    rng = np.random.default_rng(0)
    assert violations(MECHANISMS["slices"], *CLASSIC, rng)["efficient"] > 0
    assert violations(MECHANISMS["partial_allocation"], *CLASSIC, rng)["strategy_proof"] <= 1e-6
    assert len(known_answers()) == 23


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: lq_nash([0], [1]), "nobody steers"), (lambda: lq_nash([1], [1], b=0), "give one"),
        (lambda: lq_planner([1], [1], b=0), "give one a b"),
        (lambda: lq_nash([1, 1], [1, 1], b=[1, 2, 3]), r"b has shape \(3,\)"),
        (lambda: lq_nash([1], [1], discount=-1), "discount=-1"),
        (lambda: grim_trigger_delta(5, 3, 4), "nothing deters"),
        (lambda: discounted([1], 1.0), "delta < 1"),
        (lambda: plus_minus_one(1, 1, -1, 5), "lag=-1"),
        (lambda: simulate_queues([1], [1], steps=9, strategy="x"), "strategy is 'x'"),
        (lambda: simulate_queues([1.5], [1], steps=9), "arrivals has 1.5"),
        (lambda: simulate_queues([1], [], steps=9), "services is empty"),
        (lambda: uniform_service_rate(0, 1), "queues=0"),
        (lambda: Learners(1, 2, rate=2), "rate is 2"),
    ],
)  # fmt: skip
def test_what_no_game_in_time_takes_is_refused_by_its_name(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
