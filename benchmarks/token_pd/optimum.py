"""What a recorded run could have earned at best, what it earned, and when a price has settled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

#: A price has settled once it stays this close to where it goes (ratio, either way).
CLOSE = 1.25
#: Steps before a law of growth is fitted.
BEGIN = 20


@dataclass(frozen=True)
class Recorded:
    """One layer and KV head of a run: steps by tokens."""

    returns: Floats  # R of each token after each step, shape (T, n)
    kept: Flags  # whether its entry was in the cache, shape (T, n)
    there: Flags  # whether it was computed and its request ran, shape (T, n)


def fixed_optimum(recorded: Recorded, budget: int, ends: Sequence[int]) -> Floats:
    """Return the best total return of a fixed choice of tokens over the first steps.

    max sum_j x_j v_j, 0 <= x <= 1, with sum of x_j over the tokens there at most the budget in
    each step; v_j is the sum of R_j over the steps in which j is there. Tokens are there for an
    interval of steps, so that the matrix is totally unimodular and x comes out whole.

    Args:
        ends: steps after which to tell it, ascending.

    Returns:
        Shape (len(ends),).

    Raises:
        RuntimeError: the solver found no optimum.
    """
    from scipy.optimize import linprog
    from scipy.sparse import csr_array

    found = []
    for end in ends:
        there, returns = recorded.there[:end], recorded.returns[:end]
        alive = there.any(axis=0)
        values = np.where(there, returns, 0.0).sum(axis=0)[alive]
        # A step whose tokens are all there in the next one bounds nothing that that does not.
        loses = np.append((there[:-1] & ~there[1:]).any(axis=1), True)
        tight = loses & (there.sum(axis=1) > budget)
        if not tight.any():
            found.append(float(values.sum()))
            continue
        matrix = csr_array(there[tight][:, alive].astype(np.float64))
        solved = linprog(
            -values, A_ub=matrix, b_ub=np.full(int(tight.sum()), float(budget)),
            bounds=(0.0, 1.0), method="highs",
        )  # fmt: skip
        if solved.status != 0:
            raise RuntimeError(f"no optimum after {end} steps: {solved.message}")
        found.append(-float(solved.fun))
    return np.array(found)


def earned(recorded: Recorded) -> Floats:
    """Return what was earned up to each step, shape (T,)."""
    kept = recorded.kept & recorded.there
    found: Floats = np.cumsum(np.where(kept, recorded.returns, 0.0).sum(axis=1))
    return found


def filled(recorded: Recorded, budget: int) -> float:
    """Return the entries kept, of the budget's, in the steps with more tokens than those."""
    short = recorded.there.sum(axis=1) > budget
    kept = (recorded.kept & recorded.there)[short].sum(axis=1)
    return float(kept.mean()) / budget if short.any() else float("nan")


def settling(prices: Sequence[float], change: int, window: int) -> int | None:
    """Return the steps that a price takes to settle after a change of the load.

    Where it goes is its median over the second half of the `window` steps after the change.

    Args:
        change: index of the first step after it.
        window: steps that are looked at.

    Returns:
        Steps until it stays within `CLOSE` for the rest of the window; None where it does not.
    """
    after = np.array(prices[change : change + window])
    after = np.maximum(after, 1e-300)
    level = float(np.median(after[len(after) // 2 :]))
    far = np.abs(np.log(after / level)) > np.log(CLOSE)
    if not far.any():
        return 0
    last = int(np.flatnonzero(far)[-1]) + 1
    return last if last < len(after) // 2 else None
