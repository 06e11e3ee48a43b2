"""Sharing over periods: rules of `pigou.games`, and the gateway's own queue orders, by search.

Tenants report demands, (periods, tenants), of one resource. Utility is what a tenant gets of what
it truly demands. An order serves unit tasks, and a period's unserved ones go. A liar knows the
future ("strategy_proof"), or does not ("online_strategy_proof"): then it lies in the first period,
and its gain is a mean over random futures that did not choose the lie.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from pigou.control.admission.queue_order import QueuedRequest, load
from pigou.control.admission.usage_prices import FleetRates
from pigou.games import Floats
from pigou.games.drf import dynamic_max_min, max_min
from pigou.games.karma import karma
from pigou.games.lending import flexible_lending, t_period_lending
from pigou.request import SECOND, Request

Rule = Callable[[Floats], Floats]
#: Units of a period; a multiple of 2, 3 and 4 tenants.
CAPACITY = 48
GRID = tuple(range(0, CAPACITY + 1, CAPACITY // 4))
#: The known case: reports of 0, 1/2, 3/4 of the capacity gain 8% under dynamic max-min.
KNOWN = CAPACITY / 4 * np.array([[3, 4, 0], [3, 1, 3], [3, 2, 1], [0, 0, 0]], np.float64)
FLOOD = CAPACITY / 4 * np.array([[1, 4, 4]] * 4, np.float64)
_FUTURES = 12


def ordered(name: str, demands: Floats, **params: Any) -> Floats:
    """Return the units that a queue order serves, a period being a second."""
    order: Any = load({"order": name, **params})
    follows, serial = bool(getattr(order, "follows", False)), 0
    if follows:
        order.reprice(FleetRates(CAPACITY, CAPACITY, prefill_s=1.0, output_s=1.0))

    def put(tenant: int, now: int) -> QueuedRequest:
        nonlocal serial
        serial += 1
        request = Request(f"r{serial}", 1, 1, tenant=str(tenant))
        order.add(one := QueuedRequest(request, now, 1, serial=serial))
        return one

    for tenant in range(demands.shape[1]):
        order.remove(put(tenant, 0))  # all are tenants from the start
    given = np.zeros_like(demands)
    for t, row in enumerate(demands):
        now, left = t * SECOND, row.astype(int)
        waiting = {}
        places = [((k + 0.5) / n, i) for i, n in enumerate(left.tolist()) for k in range(n)]
        for _, tenant in sorted(places):  # each tenant's arrivals are spread over the period
            one = put(tenant, now)
            waiting[one.request.id] = one
        for step in range(min(CAPACITY, len(waiting))):
            one = order.first(now + step * SECOND // (2 * CAPACITY))
            del waiting[one.request.id]
            order.taken(one, 1)
            given[t, int(one.request.tenant)] += 1
        order.first(now + SECOND)  # a quantum ends
        for one in waiting.values():
            order.remove(one)
    return given


def _karma(alpha: float, demands: Floats) -> Floats:
    return karma(demands, CAPACITY // demands.shape[1], alpha=alpha)[0]


def _own(demands: Floats) -> float:
    return CAPACITY / len(demands[0])


RULES: Mapping[str, Rule] = {
    "max_min": lambda d: np.array([max_min(row, CAPACITY) for row in d]),
    "dynamic_max_min": lambda d: dynamic_max_min(d, CAPACITY),
    "karma": partial(_karma, 0.5),
    "karma, alpha 0": partial(_karma, 0.0),
    "flexible_lending": lambda d: flexible_lending(d, _own(d)),
    "t_period_lending": lambda d: t_period_lending(d, len(d) // 2, _own(d)),
    "order fcfs": partial(ordered, "fcfs"),
    "order fair (VTC), credit=0": partial(ordered, "fair", credit=0.0),
    "order fair (VTC)": partial(ordered, "fair"),
    "order drf": partial(ordered, "drf", prefill_tokens_s=1.0, credit=0.0),
    "order karma": partial(ordered, "karma", service_s=float(CAPACITY), output_weight=0.0),
    "order dlpm": partial(ordered, "dlpm", quantum=1.0, credit=0.0),
    "order d2lpm": partial(ordered, "d2lpm", quantum=1.0, credit=0.0, worker_quantum=1.0),
    "order market": partial(ordered, "market", credit=0.0),
}


def gains(
    rule: Rule, true: Floats, lies: Sequence[Sequence[float]]
) -> tuple[float, Sequence[float]]:
    """Return the first tenant's best gain, as a share of its honest utility, and the lie."""
    best: tuple[float, Sequence[float]] = (0.0, ())
    honest = _worth(rule(true)[:, 0], true[:, 0])
    for lie in lies:
        report = true.copy()
        report[: len(lie), 0] = lie
        gain = (_worth(rule(report)[:, 0], true[:, 0]) - honest) / max(honest, 1.0)
        best = max(best, (gain, tuple(lie)), key=lambda pair: pair[0])
    return best


def blind_gain(rule: Rule, tenants: int, rng: np.random.Generator) -> float:
    """Return the mean gain of a first period's best lie, over futures that did not choose it."""
    now, best = rng.choice(GRID, tenants), (-np.inf, 0)
    futures = rng.choice(GRID, (2, _FUTURES, 3, tenants)).astype(np.float64)

    def mean(lie: float, drawn: Floats) -> float:
        total = 0.0
        for future in drawn:
            true = np.vstack([now, future])
            report = true.copy()
            report[0, 0] = lie
            total += _worth(rule(report)[:, 0], true[:, 0]) - _worth(rule(true)[:, 0], true[:, 0])
        return total / len(drawn) / CAPACITY

    for lie in GRID:
        if lie != now[0]:
            best = max(best, (mean(lie, futures[0]), lie))
    return mean(best[1], futures[1])


def period_row(name: str, trials: int, seed: int) -> dict[str, Any]:
    """Return a rule's row of the audit: worst violations, and the best lie with its gain."""
    rng, rule = np.random.default_rng(seed), RULES[name]
    grain = 1.001 if name.startswith("order") else 1e-6  # whole units: ties turn one over
    worst: dict[str, float] = {}
    best: tuple[float, Sequence[float]] = (0.0, ())
    everything = list(itertools.product(GRID, repeat=3))
    for trial in range(2 + trials // 15):
        true = rng.choice(GRID, KNOWN.shape).astype(np.float64)
        true = (KNOWN, FLOOD)[trial] if trial < 2 else true
        given, n = rule(true), true.shape[1]
        own = np.array([_worth(given[:, i], true[:, i]) for i in range(n)])
        unit = grain / np.maximum(own, 1.0)
        idle = CAPACITY - np.minimum(given, true).sum(axis=1)
        waste = np.minimum(idle, np.maximum(true - given, 0.0).sum(axis=1)).max() / CAPACITY
        alone = np.minimum(true, CAPACITY / n).sum(axis=0)
        envied = np.array([[_worth(given[:, j], true[:, i]) for j in range(n)] for i in range(n)])
        split = np.hstack([true, np.floor(true[:, :1] / 2)])
        split[:, 0] -= split[:, -1]
        halves = rule(split)[:, [0, -1]]
        alike = _worth(halves, split[:, [0, -1]]) / max(own[0], 1.0) - 1.0
        after = rule(true[:, 1:])
        left = np.array([_worth(after[:, i], true[:, i + 1]) for i in range(n - 1)])
        lies = everything if not trial else rng.choice(GRID, (12, 3)).tolist()
        gain = gains(rule, true, lies)
        found = {
            "efficient": waste,
            "sharing_incentive": (alone / np.maximum(own, 1.0) - 1 - unit).max(),
            "envy_free": (envied.max(axis=1) / np.maximum(own, 1.0) - 1 - unit).max(),
            "strategy_proof": gain[0] if gain[0] > unit[0] else 0.0, "sybil_proof": alike - unit[0],
            "population_monotonic": (1 - left / np.maximum(own[1:], 1.0) - unit[1:]).max(),
            "online_strategy_proof": blind_gain(rule, n, rng) - grain / CAPACITY,
        }  # fmt: skip
        best = max(best, gain, key=lambda pair: pair[0])
        worst = {key: max(worst.get(key, 0.0), float(value)) for key, value in found.items()}
    lie = f"{100 * best[0]:.3g}%: {tuple(float(round(x / CAPACITY, 2)) for x in best[1])}"
    return {**worst, "best_lie": lie if worst["strategy_proof"] > 0 else "none"}


def _worth(given: Floats, true: Floats) -> float:
    return float(np.minimum(given, true).sum())
