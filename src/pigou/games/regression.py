"""Non-negative least squares for many poles at once: what fitting a latency law rests on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pigou.games import Floats
from pigou.games.regression_kernels import LEAST_ROWS, LOAD, ONE, POLE, PoleArrays, least

N_SAT_RATIOS = np.array([0.7, 0.8, 0.9, 1.0, 1.03, 1.1, 1.2, 1.35, 1.6, 2.0, 3.0, 6.0])
BETAS = np.array([0.5, 1.0, 2.0, 3.0])


@dataclass(frozen=True, slots=True)
class Bank:
    """Poles to try: ``n_sat`` and ``beta`` of shape (poles,). Entry 0 has none: a straight line."""

    n_sat: Floats
    beta: Floats
    floor: float = 1.0

    @property
    def arrays(self) -> PoleArrays:
        """The poles as kernels take them."""
        return self.n_sat, self.beta, self.floor

    def design(self, n: Floats) -> Floats:
        """Return the columns n, 1 and the pole's: shape (poles, observations, 3)."""
        gap = self.n_sat[1:, None] - n[None, :]
        near = np.maximum(gap, self.floor)
        beta = self.beta[1:, None]
        columns = np.zeros((len(self.n_sat), len(n), 3))
        columns[:, :, LOAD] = n
        columns[:, :, ONE] = 1.0
        columns[1:, :, POLE] = near**-beta * (1.0 + (near - gap) * beta / near)
        return columns

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
    best, errors = np.empty((len(moment), 3)), np.empty(len(moment))
    least(np.ascontiguousarray(gram), moment, np.empty((LEAST_ROWS, 3)), best, errors)
    return best, np.maximum(energy + errors, 0.0)
