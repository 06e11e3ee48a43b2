"""One shadow price clears the budget between pools and models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pigou.control.planner.price.frontier import FrontierPoint

#: Width, as a share, at which the price is known, and the rounds until then at most.
_TOLERANCE, _ROUNDS = 1e-3, 200


@dataclass(frozen=True, slots=True)
class Clearing:
    """What each model is given."""

    points: tuple[FrontierPoint, ...]  # of the models' frontiers, in their order
    price: float  # of a GPU at which the models' demands fit the budget; 0 where it is slack
    is_feasible: bool  # whether the minimum of all models fits


def clear_budget(
    frontiers: Sequence[Sequence[FrontierPoint]], gpus: int | None, gpu_price: float
) -> Clearing:
    """Divide a budget: the largest sum of value less cost less price of the GPUs.

    Args:
        frontiers: of each model, by rising GPUs; the first point is its minimum.
        gpus: in all; None for no limit.
        gpu_price: of each GPU, at least that.
    """
    own = [_demand(frontier, gpu_price) for frontier in frontiers]
    if gpus is None or sum(point.gpus for point in own) <= gpus:
        return Clearing(tuple(own), 0.0, True)
    if sum(frontier[0].gpus for frontier in frontiers) > gpus:
        return Clearing(tuple(frontier[0] for frontier in frontiers), math.inf, False)
    price = shadow_price(frontiers, gpus, gpu_price)
    return Clearing(_divide(frontiers, gpus, gpu_price), price, True)


def is_scarce(
    frontiers: Sequence[Sequence[FrontierPoint]], gpus: int | None, gpu_price: float
) -> bool:
    """Whether models would take more than the budget at the price of a GPU."""
    own = [_demand(frontier, gpu_price) for frontier in frontiers]
    return gpus is not None and sum(point.gpus for point in own) > gpus


def shadow_price(
    frontiers: Sequence[Sequence[FrontierPoint]], gpus: int, gpu_price: float
) -> float:
    """Return the price of a GPU at which demand fits the budget, by tatonnement.

    price := price exp(step excess / budget), the step halved whenever demand changes sides. Demand
    falls with the price, so this converges: below 2 / slope a step does not overshoot (Walras;
    Uzawa 1960), and halving finds that bound. It answers to demand that is computed here, at
    once; what has a lag is the fleet, and that is not waited for.
    """
    price, step = max(gpu_price, 1e-12), 1.0
    low, high = price, math.inf  # too low, high enough
    side = 0
    for _ in range(_ROUNDS):
        demand = sum(_demand(frontier, price).gpus for frontier in frontiers)
        if demand > gpus:
            low = max(low, price)
        else:
            high = min(high, price)
        if high - low <= _TOLERANCE * high and high < math.inf:
            break
        new_side = 1 if demand > gpus else -1
        step = 0.5 * step if side and side != new_side else step
        side = new_side
        excess = min(max(abs(demand - gpus) / max(gpus, 1), 0.05), 1.0) * new_side
        price *= math.exp(step * excess)
        if price <= low or price >= high:
            price = math.sqrt(low * high) if high < math.inf else 1.5 * low
    return high if high < math.inf else price


def _demand(frontier: Sequence[FrontierPoint], price: float) -> FrontierPoint:
    """Return the best point at a price; with equal ones, that of the fewest GPUs."""
    return max(frontier, key=lambda p: (p.value - p.cost - price * p.gpus, -p.gpus))


def _divide(
    frontiers: Sequence[Sequence[FrontierPoint]], gpus: int, gpu_price: float
) -> tuple[FrontierPoint, ...]:
    """Return the best points within the budget, exactly: by dynamic programming over GPUs."""
    best = np.zeros(gpus + 1)
    choices = []
    for frontier in frontiers:
        totals = np.full((len(frontier), gpus + 1), -np.inf)
        for index, point in enumerate(frontier):
            if point.gpus <= gpus:
                net = point.value - point.cost - gpu_price * point.gpus
                totals[index, point.gpus :] = best[: gpus + 1 - point.gpus] + net
        choices.append(totals.argmax(axis=0))
        best = totals.max(axis=0)
    left, points = gpus, []
    for frontier, choice in zip(reversed(frontiers), reversed(choices), strict=True):
        point = frontier[int(choice[left])]
        points.append(point)
        left -= point.gpus
    return tuple(reversed(points))
