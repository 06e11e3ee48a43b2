"""What a routing policy sees, what it returns, and how the choice follows."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pigou.config import ConfigError
from pigou.control.routing.least_loaded import LeastLoaded
from pigou.control.routing.view import Candidates, FleetView
from pigou.request import Request

GROUP = "pigou.routing"

RequestView: TypeAlias = Request


class RoutingPolicy(Protocol):
    """A formula over candidates."""

    def costs(
        self, request: RequestView, fleet: FleetView, candidates: Candidates
    ) -> NDArray[np.float64]:
        """Return the cost of each candidate, shape (candidates,), in the policy's own unit.

        Lower is better; infinity forbids. Arrays of the view must not be written to.
        """
        ...


@dataclass(frozen=True, slots=True)
class Pick:
    """The candidate that was chosen, by index, and its cost."""

    index: int
    cost: float


def cheapest(costs: NDArray[np.float64], generator: np.random.Generator) -> Pick | None:
    """Return the cheapest candidate, ties broken at random; None when all are forbidden.

    Raises:
        ValueError: a cost is not a number.
    """
    if costs.size == 0:
        return None
    least = costs.min()
    if np.isnan(least):
        raise ValueError("a routing policy returned a cost that is not a number")
    if least == np.inf:
        return None
    ties = np.flatnonzero(costs == least)
    index = ties[0] if ties.size == 1 else ties[generator.integers(ties.size)]
    return Pick(int(index), float(least))


def load(name: str) -> RoutingPolicy:
    """Return a new policy by its name in the entry point group `pigou.routing`.

    Raises:
        ConfigError: there is none of that name; the message lists those that there are.
    """
    if name == LeastLoaded.name:
        return LeastLoaded()
    found = entry_points(group=GROUP)
    for entry in found:
        if entry.name == name:
            policy: RoutingPolicy = entry.load()()
            return policy
    names = ", ".join(sorted({LeastLoaded.name, *found.names}))
    raise ConfigError(f"policy is {name!r}; it must be one of: {names}")
