"""Games played again and again: discounting, grim trigger, and planners that answer late."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pigou.games import checked


def discounted(payoffs: Sequence[float], delta: float) -> float:
    """Return the sum of payoffs times delta^t; the last payoff goes on for ever if delta < 1."""
    _check_delta(delta)
    values = checked("payoffs", list(payoffs), (None,), low=-np.inf).tolist()
    if not values or (delta == 1.0):
        raise ValueError(f"{len(values)} payoffs, delta={delta}: give one or more, and delta < 1")
    total = sum(value * delta**t for t, value in enumerate(values))
    return float(total + values[-1] * delta ** len(values) / (1.0 - delta))


def grim_trigger_delta(temptation: float, reward: float, punishment: float) -> float:
    """Return the least delta at which grim trigger sustains cooperation: (T - R) / (T - P).

    T: payoff of defecting once, R: of cooperation, P: of mutual defection. 0 where defecting does
    not pay; raises ValueError where punishment is no worse than cooperation.
    """
    if not all(map(math.isfinite, (temptation, reward, punishment))):
        raise ValueError(f"payoffs are {temptation}, {reward}, {punishment}: give finite numbers")
    if temptation <= reward:
        return 0.0
    if punishment >= reward:
        raise ValueError(f"punishment is {punishment}, reward {reward}: nothing deters; it must "
                         "be below the reward")  # fmt: skip
    return (temptation - reward) / (temptation - punishment)


def patience_delta(period_s: float, patience_s: float) -> float:
    """Return delta = exp(-period / patience) of a client that retries every `period_s`."""
    if not period_s >= 0.0 or not patience_s > 0.0:
        raise ValueError(f"period_s={period_s}, patience_s={patience_s}: give seconds above 0")
    return math.exp(-period_s / patience_s)


@dataclass(frozen=True, slots=True)
class Response:
    """A planner's path to `target` workers, a worker a step at most."""

    workers: tuple[int, ...]  # ready after each step
    overshoot: int  # workers beyond the target, at most
    sign_changes: int  # orders that reverse the last one
    settled: int | None  # step from which it stays at the target; None if it does not


def plus_minus_one(target: int, start: int, lag: int, steps: int) -> Response:
    """Simulate a planner that orders +1 or -1 by the workers it sees; orders take `lag` steps."""
    if lag < 0 or steps < 1:
        raise ValueError(f"lag={lag}, steps={steps}: give a lag from 0 and a step or more")
    ready, orders = start, [0] * lag
    path, signs = [], []
    for _ in range(steps):
        order = (target > ready) - (target < ready)
        orders.append(order)
        signs += [order] if order else []
        ready += orders.pop(0)
        path.append(ready)
    side = 1 if target >= start else -1
    overshoot = max(0, *(side * (workers - target) for workers in path))
    changes = sum(one != other for one, other in itertools.pairwise(signs))
    away = [at for at, workers in enumerate(path) if workers != target]
    settled = away[-1] + 1 if away else 0
    # An order under way would move it again.
    still = settled < steps and not any(orders)
    return Response(tuple(path), overshoot, changes, settled if still else None)


def lagged_integrator_stable(gain: float, lag: float) -> bool:
    """True if x' = -gain x(t - lag) dies out: 0 < gain lag < pi / 2 (Hayes 1950)."""
    if not lag >= 0.0:
        raise ValueError(f"lag is {lag}: give seconds of at least 0")
    return gain > 0.0 and gain * lag < math.pi / 2.0


def _check_delta(delta: float) -> None:
    if not 0.0 <= delta <= 1.0:
        raise ValueError(f"delta is {delta}: give a discount factor from 0 to 1")
