"""Mechanisms that share resources between tenants, and an audit of their properties by search.

A mechanism maps reports (tenants, resources) and capacities to bundles; a tenant's utility is the
tasks that its bundle serves of what it truly needs. "Holds" means: no counterexample in the trials.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from pigou.games import Floats
from pigou.games.auctions import double_dutch, themis_round
from pigou.games.ceei import ceei
from pigou.games.drf import asset_fair, drf, dynamic_max_min, max_min
from pigou.games.fisher import fisher, volatile_market
from pigou.games.karma import karma
from pigou.games.lending import flexible_lending, t_period_lending
from pigou.games.lq_game import lq_price_of_anarchy
from pigou.games.nash_bargaining import nash_bargaining
from pigou.games.partial_allocation import partial_allocation
from pigou.games.repeated import (
    discounted,
    grim_trigger_delta,
    lagged_integrator_stable,
    patience_delta,
    plus_minus_one,
)
from pigou.games.strategic_queues import (
    NO_REGRET_FACTOR,
    PATIENT_FACTOR,
    capacity_factor,
    simulate_queues,
    uniform_service_rate,
)
from pigou_lab.games.sharing_periods import RULES, period_row

Mechanism = Callable[[Floats, Floats], Floats]
MECHANISMS: Mapping[str, Mechanism] = {
    "drf": lambda needs, room: drf(needs, room).tasks[:, None] * needs,
    "asset_fair": lambda needs, room: asset_fair(needs, room).tasks[:, None] * needs,
    "ceei": lambda needs, room: ceei(needs, room).tasks[:, None] * needs,
    "partial_allocation": lambda needs, room: (
        partial_allocation(needs, room, leontief=True).allocation
    ),
    "slices": lambda needs, room: np.tile(room / len(needs), (len(needs), 1)),
}
PROPERTIES = ("efficient", "sharing_incentive", "envy_free", "strategy_proof",
              "population_monotonic", "sybil_proof")  # fmt: skip
#: Gain, as a share, from which on a deviation counts.
_GAIN = 1e-5
CLASSIC = np.array([[1.0, 4.0], [3.0, 1.0]]), np.array([9.0, 18.0])


def served(bundle: Floats, needs: Floats) -> Floats:
    """Return the tasks that bundles (.., resources) serve of what a task needs, (resources,)."""
    tasks: Floats = (bundle[..., needs > 0] / needs[needs > 0]).min(axis=-1)
    return tasks


def violations(
    mechanism: Mechanism, needs: Floats, room: Floats, rng: np.random.Generator,
    told: dict[float, str] | None = None,
) -> dict[str, float]:  # fmt: skip
    """Return by how much each property fails on an instance, as a share; 0 where it holds.

    `told` receives lies by their gain.
    """
    tenants = len(needs)
    bundles = mechanism(needs, room)
    own = np.array([served(bundle, need) for bundle, need in zip(bundles, needs, strict=True)])
    left = room - own @ needs
    more = [float(served(left, need)) for need in needs]
    alone = np.array([served(room / tenants, need) for need in needs])
    envied = np.array([served(bundles, need).max() for need in needs])
    worst = {
        "efficient": max(more / own), "sharing_incentive": max(alone / own - 1.0),
        "envy_free": max(envied / own - 1.0), "strategy_proof": 0.0, "population_monotonic": 0.0,
        "sybil_proof": 0.0,
    }  # fmt: skip
    for i in range(tenants):
        lies = [needs[i] * rng.choice([0.5, 1.0, 1.5, 2.0, 4.0], len(room)) for _ in range(6)]
        for lie in lies:
            report = needs.copy()
            report[i] = lie
            value = float(served(mechanism(report, room)[i], needs[i]))
            gain = value / own[i] - 1.0
            if told is not None and gain > max(_GAIN, worst["strategy_proof"]):
                told[gain] = f"{100 * gain:.3g}%: {needs[i].tolist()} as {lie.tolist()}"
            worst["strategy_proof"] = max(worst["strategy_proof"], gain)
        twice = mechanism(np.vstack([needs, needs[i]]), room)
        value = float(served(twice[i] + twice[-1], needs[i]))
        worst["sybil_proof"] = max(worst["sybil_proof"], value / own[i] - 1.0)
        others = np.delete(np.arange(tenants), i)
        if len(others):
            after = mechanism(needs[others], room)
            values = [served(after[at], needs[j]) / own[j] for at, j in enumerate(others)]
            worst["population_monotonic"] = max(
                worst["population_monotonic"], 1.0 - float(min(values))
            )
    return {name: float(value) for name, value in worst.items()}


def audit(
    name: str, trials: int, seed: int, told: dict[float, str] | None = None
) -> dict[str, float | None]:
    """Return each property's worst violation over random instances; None where it holds."""
    rng = np.random.default_rng(seed)
    worst = dict.fromkeys(PROPERTIES, 0.0)
    instances = [CLASSIC, (np.array([[1.0, 3.0], [1.0, 1.0]]), np.array([30.0, 30.0]))]
    for trial in range(trials):
        n, m = int(rng.integers(2, 5)), int(rng.integers(1, 4))
        random = rng.integers(1, 6, (n, m)).astype(np.float64), rng.uniform(5, 30, m)
        needs, room = instances[trial] if trial < len(instances) else random
        for key, value in violations(MECHANISMS[name], needs, room, rng, told).items():
            worst[key] = max(worst[key], value)
    return {key: value if value > _GAIN else None for key, value in worst.items()}


def audits(trials: int, seed: int) -> list[dict[str, Any]]:
    """Return a row for each mechanism: "yes", or the worst violation in per cent.

    First those of several resources, then those of one resource over periods, with queue orders.
    """
    rows: list[dict[str, Any]] = []
    for name in MECHANISMS:
        told: dict[float, str] = {}
        made = audit(name, trials, seed, told)
        best = told[max(told)] if told else "none"
        rows.append({"mechanism": name, **made, "online_strategy_proof": "-", "best_lie": best})
    rows += [{"mechanism": name, **period_row(name, trials, seed)} for name in RULES]
    return [{key: _cell(value) for key, value in row.items()} for row in rows]


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "yes" if value is None or value <= _GAIN else f"no: {100 * value:.3g}%"


def known_answers() -> list[dict[str, Any]]:
    """Return textbook instances of mechanisms and of games in time, solved."""
    needs, room = CLASSIC
    moving = [[0.75, 1, 0], [0.75, 0.25, 0.75], [0.75, 0.5, 0.25]]
    quanta = [[3, 2, 1], [3, 0, 0], [0, 3, 6], [2, 2, 3], [2, 3, 5]]
    queues = simulate_queues([0.9] * 4, [1.0] * 4, steps=2000, strategy="exp3")
    late = plus_minus_one(target=6, start=3, lag=3, steps=60)
    answers: Sequence[tuple[str, Any]] = (
        ("DRF, tasks", drf(needs, room).tasks),
        ("CEEI, tasks", ceei(needs, room).tasks),
        ("asset fairness, tasks", asset_fair(needs, room).tasks),
        ("dynamic max-min, totals", dynamic_max_min(moving, 1).sum(axis=0)),
        ("instant max-min, totals", sum(max_min(row, 1) for row in moving)),
        ("Karma, totals", karma(quanta, 2, alpha=0.5, credits=6)[0].sum(axis=0)),
        ("flexible lending, totals", flexible_lending(moving, 1 / 3).sum(axis=0)),
        ("lending over 2 T rounds, T = 1", t_period_lending([[2, 0], [1, 1]], 1)),
        ("linear Fisher market, prices", fisher([[2, 1], [1, 3]], [1, 2]).prices),
        ("volatile market, progress", volatile_market([[1, 1, 0], [0, 1, 2]], 1).utilities),
        ("partial allocation, fractions", partial_allocation([[2, 1], [1, 3]]).fractions),
        ("Themis, goods of each app in a round",
         (themis_round([[2, 1], [1, 3], [1, 1]], [1, 5, 4]).allocation.sum(axis=1))),
        ("double Dutch, price", double_dutch([10, 8, 6, 4], [3, 5, 7, 9]).price or 0.0),
        ("Nash bargaining, utilities",
         nash_bargaining([2, 3], matrix=[[1, 1]], limits=[10]).utilities),
        ("LQ game of two, Price of Anarchy", lq_price_of_anarchy([1, 1], [1, 1])),
        ("grim trigger, least delta", grim_trigger_delta(5, 3, 1)),
        ("its payoff at a retry each second, patience 2 s",
         discounted([3], patience_delta(1, 2))),
        ("+-1 planner with lag 3: overshoot, reversals", [late.overshoot, late.sign_changes]),
        ("integrator of gain 1 with lag 1.5 is stable", lagged_integrator_stable(1.0, 1.5)),
        ("four queues at random: served of each", uniform_service_rate(4, 4)),
        ("factors for patient queues, for no regret", [PATIENT_FACTOR, NO_REGRET_FACTOR]),
        ("EXP3 at capacity factor", capacity_factor([0.9] * 4, [1.0] * 4)),
        ("stable there", queues.stable()),
    )  # fmt: skip
    return [
        {"question": question, "answer": np.asarray(answer).tolist()}
        for question, answer in answers
    ]
