"""The less loaded of two random workers."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from pigou.control.routing.policy import Costs, RequestView
from pigou.control.routing.stages import Rows, Stage, Staged, pending
from pigou.control.routing.view import Counts, FleetView


class PowerOfTwo(Staged):
    """Draw two different workers; cost_i = requests in flight of those two, infinity of others.

    Mitzenmacher, "The power of two choices in randomized load balancing" (2001); the default of
    Ray Serve, and `power_of_two` of SGLang's gateway. Two workers are drawn for each stage.

    Args:
        seed: of the draws.
    """

    name: ClassVar[str] = "power-of-two"

    def __init__(self, seed: int = 0) -> None:
        self._generator = np.random.default_rng(seed)

    def stage(
        self,
        request: RequestView,  # noqa: ARG002
        fleet: FleetView,
        rows: Rows,
        stage: Stage,
    ) -> dict[str, Costs]:
        """Return requests in flight, (rows,)."""
        return {"requests": two_choices(pending(fleet, rows, stage), self._generator)}


def two_choices(load: Counts, generator: np.random.Generator) -> Costs:
    """Return the load of two that are drawn, and infinity for all others, shape of `load`."""
    found = np.full(len(load), np.inf)
    one = int(generator.integers(len(load)))
    found[one] = load[one]
    if len(load) > 1:
        other = int(generator.integers(len(load) - 1))
        other += other >= one
        found[other] = load[other]
    return found
