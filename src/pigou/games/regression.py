"""Non-negative least squares for many poles at once: what fitting a latency law rests on."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np

from pigou.games.arrays import Floats

N_SAT_RATIOS = np.array([0.7, 0.8, 0.9, 1.0, 1.03, 1.1, 1.2, 1.35, 1.6, 2.0, 3.0, 6.0])
BETAS = np.array([0.5, 1.0, 2.0, 3.0])
#: Sets of parameters (a, b, d) that may be above 0; the others are 0.
SUPPORTS = [list(s) for size in (1, 2, 3) for s in combinations(range(3), size)]
RIDGE = 1e-11
#: The same by their size, as lists and as an array (sets, size), to be solved at once.
_SIZES = [
    (some, np.array(some))
    for some in ([s for s in SUPPORTS if len(s) == size] for size in (1, 2, 3))
]


@dataclass(frozen=True, slots=True)
class Bank:
    """Poles to try: ``n_sat`` and ``beta`` of shape (poles,). Entry 0 has none: a straight line."""

    n_sat: Floats
    beta: Floats
    floor: float = 1.0

    def design(self, n: Floats) -> Floats:
        """Return the columns n, 1 and the pole's: shape (poles, observations, 3)."""
        gap = self.n_sat[1:, None] - n[None, :]
        near = np.maximum(gap, self.floor)
        beta = self.beta[1:, None]
        columns = np.zeros((len(self.n_sat), len(n), 3))
        columns[:, :, 0] = n
        columns[:, :, 1] = 1.0
        columns[1:, :, 2] = near**-beta * (1.0 + (near - gap) * beta / near)
        return columns

    def row(self, n: float) -> Floats:
        """Return the columns of one observation: shape (poles, 3)."""
        return self.design(np.array([n], dtype=np.float64))[:, 0, :]

    def fit(self, n: Floats, seconds: Floats, weight: Floats) -> tuple[Floats, Floats]:
        """Return each pole's best parameters (poles, 3) and weighted squared error (poles,).

        ``weight`` has shape (observations,) or (poles, observations).
        """
        design = self.design(n)
        weight = np.broadcast_to(weight, design.shape[:2])
        weighted = design * weight[:, :, None]
        gram = np.swapaxes(weighted, 1, 2) @ design
        moment = np.einsum("pij,i->pj", weighted, seconds)
        return solve(gram, moment, weight @ np.square(seconds))


def bank_over(n_max: float) -> Bank:
    """Return the poles to try where loads reach ``n_max``."""
    n_sat, beta = np.meshgrid(n_max * N_SAT_RATIOS + 0.5, BETAS)
    return Bank(np.append(np.inf, n_sat.ravel()), np.append(1.0, beta.ravel()))


def bank_around(bank: Bank, index: int, depth: int) -> Bank:
    """Return a finer grid about one pole of a bank; the straight line stays its entry 0."""
    if index == 0:
        return bank
    spread = 0.2 / 1.6 ** (depth - 1)
    steps = np.array([-1.0, -0.5, 0.0, 0.5, 1.0])
    n_sat, beta = np.meshgrid(
        bank.n_sat[index] * np.exp(spread * steps), bank.beta[index] * np.exp(2 * spread * steps)
    )
    return Bank(np.append(np.inf, n_sat.ravel()), np.append(1.0, beta.ravel()))


def solve(gram: Floats, moment: Floats, energy: Floats | float) -> tuple[Floats, Floats]:
    """Minimise x'Gx - 2 x'm + e over x >= 0, for a stack of G (k, 3, 3) and m (k, 3).

    Returns the minimisers (k, 3) and the minima (k,). With three unknowns, trying each set of
    non-zero ones is both exact and fast.
    """
    size = np.sqrt(np.maximum(np.einsum("kii->ki", gram), 1e-300))
    unit = gram / (size[:, :, None] * size[:, None, :]) + RIDGE * np.eye(3)
    right = moment / size
    poles = np.arange(len(moment))
    found = np.zeros((len(SUPPORTS), len(moment), 3))
    errors = np.empty((len(SUPPORTS), len(moment)))
    refused = np.empty(errors.shape, dtype=np.bool_)
    first = 0
    for some, supports in _SIZES:
        among = right[:, supports]
        matrix = unit[:, supports[:, :, None], supports[:, None, :]]
        if first:
            part = np.linalg.solve(matrix, among[:, :, :, None])[..., 0]
        else:  # single numbers
            part = among / matrix[:, :, :, 0]
        last = first + len(some)
        errors[first:last] = -np.einsum("kns,kns->nk", part, among)
        refused[first:last] = (part < 0).any(axis=2).T
        found[np.arange(first, last)[:, None], :, supports] = part.transpose(1, 2, 0)
        first = last
    bars = 1e-12 * np.abs(errors)
    errors[refused] = np.inf
    least, chosen = errors[0], np.zeros(len(moment), dtype=np.intp)
    for number in range(1, len(SUPPORTS)):
        # Of sets that are equally good the smallest is taken.
        better = errors[number] < least - bars[number]
        least = np.where(better, errors[number], least)
        chosen[better] = number
    some_set = np.isfinite(least)
    best = np.where(some_set[:, None], found[chosen, poles], 0.0)
    return best / size, np.maximum(energy + np.where(some_set, least, 0.0), 0.0)
