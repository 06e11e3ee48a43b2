"""The Price of Anarchy of parallel workers by load, and its limits in light and heavy traffic.

Colini-Baldeschi, Cominetti, Mertikopoulos and Scarsini, "When is selfish routing bad? The price of
anarchy in light and heavy traffic" (Operations Research 68, 2020).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pigou.config import check_fields
from pigou_lab.games.nonatomic import ParallelLinks

Cost = Callable[[float], float]


@dataclass(frozen=True)
class PoleLaw:
    """Seconds with a flow n on a worker: a n + b + d / (n_sat - n)^beta, infinite from n_sat on.

    M/M/1 with service rate mu is `PoleLaw(0, 0, 1, mu)`. `LatencyLaw` is the same with a floor near
    the pole, which keeps it finite.
    """

    a: float
    b: float
    d: float
    n_sat: float
    beta: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self, "a", "b", ge=0)
        check_fields(self, "d", "n_sat", "beta", gt=0)

    def __call__(self, n: float) -> float:
        """Return the seconds of each part of the flow."""
        if n >= self.n_sat:
            return math.inf
        return float(self.a * n + self.b + self.d * (self.n_sat - n) ** -self.beta)

    def marginal(self, n: float) -> float:
        """Return d/dn of n f(n); differences would lose it near the pole."""
        if n >= self.n_sat:
            return math.inf
        gap = self.n_sat - n
        return float(2 * self.a * n + self.b + self.d * gap**-self.beta * (1 + self.beta * n / gap))


def price_at(costs: Sequence[Cost], demand: float) -> float:
    """Return the Price of Anarchy of a demand over parallel workers (nonatomic)."""
    return ParallelLinks(costs, demand).price_of_anarchy()


def heavy_limit(laws: Sequence[PoleLaw]) -> float:
    """Return the limit of the Price of Anarchy as the load approaches the capacity of all workers.

    With N_w = n_sat of worker w, and one beta,

        (sum N_w) (sum d_w^(1/beta))^beta / (sum (N_w d_w)^(1/(beta+1)))^(beta+1)

    An equilibrium leaves w a slack in proportion to d_w^(1/beta), the optimum one to
    (N_w d_w)^(1/(beta+1)). It is 1 just where N_w is in proportion to d_w^(1/beta), as on identical
    workers. For M/M/1 it is m sum(mu) / (sum sqrt(mu))^2, at most the m of Haviv and Roughgarden
    (2007). Costs without a pole that vary regularly have the limit 1. So have all costs above 0 at
    no load in light traffic: the flow is on the cheapest workers. Raises ValueError where betas
    differ.
    """
    betas = {law.beta for law in laws}
    if len(betas) != 1:
        raise ValueError(f"beta is {sorted(betas)}: the limit is known for one beta of all workers")
    beta = betas.pop()
    n_sat, d = np.array([law.n_sat for law in laws]), np.array([law.d for law in laws])
    selfish = n_sat.sum() * (d ** (1 / beta)).sum() ** beta
    return float(selfish / ((n_sat * d) ** (1 / (beta + 1))).sum() ** (beta + 1))


def swinging(flow: float) -> float:
    """Return x (1 + sin(ln x) / 2): rising and convex in total, but not regularly varying.

    Beside a worker of cost x its Price of Anarchy repeats whenever the load grows by e^(2 pi), so
    it has no limit in light or heavy traffic.
    """
    return flow * (1.0 + 0.5 * math.sin(math.log(flow))) if flow > 0 else 0.0
