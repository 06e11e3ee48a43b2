"""Selection by cost: the cheapest with random ties, or softmax at a temperature."""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from pigou.compiled import bare_kernel

_INF = float("inf")

#: How costs enter the softmax: as they are (the paper's Eq. 2), or divided by their range
#: (what Dynamo ships), which makes the spread the same whatever the gap in cost.
Softmax = Literal["raw", "min-max"]


class Pick(msgspec.Struct):
    """Index and cost of the chosen candidate."""

    index: int
    cost: float


@bare_kernel
def cheapest(costs: NDArray[np.float64]) -> tuple[float, int, int]:
    """Return the minimum cost, its first index and its count; NaN if any cost is."""
    lowest, at, ties = costs[0], 0, 1
    for i in range(1, costs.shape[0]):
        if costs[i] < lowest:
            lowest, at, ties = costs[i], i, 1
        elif costs[i] == lowest:
            ties += 1
        elif costs[i] != costs[i]:
            return costs[i], i, 1
    return lowest, at, ties


@bare_kernel
def _nth(costs: NDArray[np.float64], cost: float, number: int) -> int:
    for i in range(costs.shape[0]):
        if costs[i] == cost:
            if number == 0:
                return i
            number -= 1
    return -1


def select(
    costs: NDArray[np.float64],
    generator: np.random.Generator,
    temperature: float = 0.0,
    softmax: Softmax = "min-max",
) -> Pick | None:
    """Choose a candidate; None if all are forbidden. Raises ValueError for NaN or minus infinity.

    Temperature 0 takes the cheapest; else P(i) ~ exp(-c_i / temperature) (Georgiou 2026, Eq. 2),
    with c_i over max c - min c under `min-max` (Dynamo 1.x).
    """
    if costs.size == 0:
        return None
    costs = np.ascontiguousarray(costs, dtype=np.float64)
    lowest, index, ties = cheapest(costs)
    if not lowest > -_INF:
        raise ValueError("a routing policy returned a cost that is not a number")
    if lowest == _INF:
        return None
    if temperature > 0.0:
        index = _draw(costs, lowest, generator, temperature, softmax)
        return Pick(index, float(costs[index]))
    if ties > 1:
        index = _nth(costs, lowest, int(ties * generator.random()))  # quicker than `integers`
    return Pick(index, lowest)


def probabilities(
    costs: NDArray[np.float64], temperature: float, softmax: Softmax = "min-max"
) -> NDArray[np.float64]:
    """Return each candidate's probability at a temperature above 0, (candidates,)."""
    above = costs - costs.min()
    if softmax == "min-max":
        spread = above[np.isfinite(above)].max()
        above = above / spread if spread > 0 else above
    weight = np.exp(-above / temperature)
    chances: NDArray[np.float64] = weight / weight.sum()
    return chances


def _draw(
    costs: NDArray[np.float64], lowest: float, generator: np.random.Generator, temperature: float,
    softmax: Softmax,
) -> int:  # fmt: skip
    if costs.size == 1 or costs.max() == lowest:
        return int(generator.integers(costs.size))
    chances = np.cumsum(probabilities(costs, temperature, softmax))
    return min(int(np.searchsorted(chances, generator.random(), side="right")), costs.size - 1)
