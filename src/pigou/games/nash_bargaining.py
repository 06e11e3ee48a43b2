"""Nash bargaining: max prod_i (u_i - d_i)^w_i over what players can agree on (Nash 1950).

d_i is what i has without agreement. With a static slice as d the sharing incentive holds by
construction; with d = 0 it is proportional fairness.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import linprog

from pigou.games import Floats, checked
from pigou.games.nash_welfare import max_nash_welfare

#: Gain of everybody below which nobody is better off, as a share of the numbers given.
_NOTHING = 1e-9


@dataclass(frozen=True, slots=True)
class Agreement:
    """A bargain; `shares` are the probabilities of `points`, empty for a polytope."""

    utilities: Floats
    product: float  # product of (u_i - d_i)^w_i
    shares: Floats


def nash_bargaining(
    disagreement: ArrayLike, *, matrix: ArrayLike | None = None, limits: ArrayLike | None = None,
    points: ArrayLike | None = None, powers: ArrayLike | None = None,
) -> Agreement:  # fmt: skip
    """Return the bargain over {u: matrix u <= limits}, or over lotteries of `points`.

    `matrix` is (rows, players), `points` (outcomes, players); utilities may be thrown away.
    `powers` are the players' bargaining powers w. Raises ValueError where not everybody can be
    above `disagreement`, or somebody without bound.
    """
    d = checked("disagreement", disagreement, (None,), low=-np.inf)
    players = len(d)
    power = np.ones(players) if powers is None else powers
    power = checked("powers", power, (players,), above=True)
    if (points is None) == (matrix is None) or (matrix is None) != (limits is None):
        raise ValueError("give matrix and limits, or points, and not both")
    if points is not None:
        outcomes = checked("points", points, (None, players), low=-np.inf)
        values, rows, bounds = (outcomes - d).T, np.ones((1, len(outcomes))), np.ones(1)
    else:
        rows = checked("matrix", matrix if matrix is not None else (), (None, players), low=-np.inf)
        bounds = checked("limits", limits if limits is not None else (), (len(rows),), low=-np.inf)
        values, bounds = np.eye(players), bounds - rows @ d
    scale = max(1.0, float(np.abs(values).max(initial=0.0)), float(np.abs(bounds).max(initial=0.0)))
    _check_gain(values, rows, bounds, scale)
    made = max_nash_welfare(values, power, rows, bounds)
    product = float(np.prod(made.utilities**power))
    return Agreement(d + made.utilities, product, made.x if points is not None else np.zeros(0))


def _check_gain(values: Floats, rows: Floats, bounds: Floats, scale: float) -> None:
    """Refuse sets in which some player cannot win, or can win without bound."""
    size = values.shape[1]
    wins = np.hstack([-values, np.ones((len(values), 1))])  # t <= V x
    above = np.vstack([wins, np.hstack([rows, np.zeros((len(rows), 1))])])
    limits = np.concatenate([np.zeros(len(values)), bounds])
    first = linprog(
        np.eye(size + 1)[-1] * -1.0, above, limits, bounds=[(0, None)] * size + [(None, scale)]
    )
    if first.status != 0 or -first.fun <= _NOTHING * scale:
        raise ValueError(
            "disagreement leaves nothing to agree on: no outcome within the limits is above it for "
            "every player; lower it, or raise the limits"
        )
    for i, row in enumerate(values):
        bound = linprog(-row, rows, bounds, bounds=(0, None))
        if bound.status == 3:
            raise ValueError(f"limits do not bound player {i}: add a row that does")
