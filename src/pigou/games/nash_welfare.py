"""Largest Nash welfare: max sum_i w_i log(V_i x + c_i) so that A x <= b and x >= 0.

Markets, bargaining and proportional fairness are this program (Eisenberg and Gale 1959). A
primal-dual interior point method solves it; the dual of a row of A is the price of that resource.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pigou.games import Floats

#: Iterations, relative error at which they end, and with which a solution counts.
_ITERATIONS, _PRECISION, _ACCEPTED = 60, 1e-14, 1e-7
_SHRINK, _BOUNDARY = 0.1, 0.995
#: Diagonal from which a variable is eliminated from a step, and variables from which any is.
_LARGE, _MANY = 1e-3, 200


@dataclass(frozen=True, slots=True)
class Welfare:
    """A solution; utilities are V x + c."""

    x: Floats
    utilities: Floats
    prices: Floats  # duals of the rows of A


def max_nash_welfare(
    values: Floats, weights: Floats, matrix: Floats, limits: Floats, past: Floats | None = None
) -> Welfare:
    """Maximise welfare; `values` is V (players, variables), `past` is c.

    A player of no weight, or whose utility no variable can raise, has no say. Every variable that
    raises a utility must be limited. Raises ValueError where there is no optimum.
    """
    past = np.zeros(len(values)) if past is None else past
    positive = (matrix >= 0).all()
    useful = (values[weights > 0] != 0).any(axis=0)
    if positive:  # variables without room are 0
        useful = useful & ~(matrix[limits <= 0] > 0).any(axis=0)
    bounded = (matrix > 0).any(axis=0)
    if (useful & ~bounded).any():
        raise ValueError(f"variable {np.argmax(useful & ~bounded)} has no limit: give it one")
    players = (weights > 0) & ((values[:, useful] > 0).any(axis=1))
    useful &= (values[players] != 0).any(axis=0)
    rows = (matrix[:, useful] != 0).any(axis=1)
    x, prices = np.zeros(values.shape[1]), np.zeros(len(limits))
    if players.any():
        some = np.ix_(players, useful)
        ours = matrix[np.ix_(rows, useful)]
        x[useful], prices[rows] = _solve(
            values[some], weights[players], ours, limits[rows], past[players]
        )
    return Welfare(x, values @ x + past, prices)


def _solve(v: Floats, w: Floats, a: Floats, b: Floats, c: Floats) -> tuple[Floats, Floats]:
    """Return x and prices, in units in which all numbers are about 1.

    Symbols: l and u have l u = w; y, s of the rows and z, x of the variables have products of mu.
    """
    row = np.where(b > 0, b, np.maximum(np.abs(a).max(axis=1), np.abs(b)))
    a, b = a / row[:, None], b / row
    column = 1.0 / np.where((a > 0).any(axis=0), np.maximum(a.max(axis=0), 1e-300), 1.0)
    a, v = a * column, v * column
    scale = np.maximum(np.abs(v).max(axis=1), np.abs(c))
    v, c, total = v / scale[:, None], c / scale, w.sum()
    w = w / total
    size, rows = v.shape[1], len(b)
    x = np.full(size, 1.0 / (1 + len(v)))
    s = np.maximum(b - a @ x, 0.1)
    u = np.maximum(v @ x + c, 0.1)
    lam, y, z = w / u, np.full(rows, 1.0 / rows), np.full(size, 1.0 / size)
    best, solution = np.inf, (x, y, s, z)
    for _ in range(_ITERATIONS):
        mu = (y @ s + z @ x) / (rows + size)
        r_dual, r_use, r_room = v.T @ lam - a.T @ y + z, v @ x + c - u, a @ x + s - b
        # Rounding of the gradient moves utilities by its square, so that it weighs less.
        residuals = (1e-4 * r_dual, r_use, r_room, lam * u - w)
        error = max(mu * (rows + size), *(np.abs(r).max() for r in residuals))
        if error < best:
            best, solution = error, (x, y, s, z)
        if error < _PRECISION or error > 1e4 * best:  # the latter: rounding takes over
            break
        mu *= _SHRINK
        right = r_dual + (mu - z * x) / x
        right += v.T @ ((w - lam * u - lam * r_use) / u) - a.T @ ((mu - y * s + y * r_room) / s)
        try:
            dx = _newton(np.vstack([v, a]), np.concatenate([lam / u, y / s]), z / x, right)
        except np.linalg.LinAlgError:
            break
        ds, du = -r_room - a @ dx, v @ dx + r_use
        dy, dz, dl = (
            (mu - y * s - y * ds) / s,
            (mu - z * x - z * dx) / x,
            (w - lam * u - lam * du) / u,
        )
        step = 1.0
        for at, move in ((x, dx), (s, ds), (u, du), (lam, dl), (y, dy), (z, dz)):
            down = move < 0
            step = min(step, _BOUNDARY * (-at[down] / move[down]).min(initial=np.inf))
        x, s, u = x + step * dx, s + step * ds, u + step * du
        lam, y, z = lam + step * dl, y + step * dy, z + step * dz
    x, y, s, z = solution
    if not best < _ACCEPTED:
        raise ValueError("limits leave no point at which every player is above 0, or no optimum")
    x[(x < z) & (x < 1e-7)] = 0.0  # rounding of what the optimum leaves out
    y[(y < s) & (y < 1e-7)] = 0.0
    return x * column, y * total / row


def _newton(rows: Floats, weights: Floats, diagonal: Floats, right: Floats) -> Floats:
    """Solve (rows' diag(weights) rows + diag(diagonal)) x = right.

    Of many variables, those of a large diagonal are eliminated: all that the optimum leaves out.
    """
    if len(right) < _MANY:
        return np.asarray(np.linalg.solve((rows.T * weights) @ rows + np.diag(diagonal), right))
    out = diagonal > _LARGE
    inverse, rest = 1.0 / diagonal[out], rows[:, ~out]
    inner = (rows[:, out] * inverse) @ rows[:, out].T + np.diag(1.0 / weights)
    system = np.block([[np.diag(diagonal[~out]), rest.T], [rest, -inner]])
    shift = rows[:, out] @ (inverse * right[out])
    solved = np.linalg.solve(system, np.concatenate([right[~out], -shift]))
    x, duals = np.empty_like(right), solved[rest.shape[1] :]
    x[~out], x[out] = solved[: rest.shape[1]], inverse * (right[out] - rows[:, out].T @ duals)
    return x
