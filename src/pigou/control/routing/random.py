"""Any candidate."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from pigou.control.routing.policy import Costs, RequestView
from pigou.control.routing.stages import Rows, Stage, Staged
from pigou.control.routing.view import FleetView


class Random(Staged):
    """Every worker costs the same, and ties are random: cost_i = 0.

    In a fleet with separate pools, a random prefill worker and a random decode worker.
    """

    name: ClassVar[str] = "random"

    def stage(
        self,
        request: RequestView,  # noqa: ARG002
        fleet: FleetView,  # noqa: ARG002
        rows: Rows,
        stage: Stage,  # noqa: ARG002
    ) -> dict[str, Costs]:
        """Return zeros, (rows,)."""
        return {"chance": np.zeros(len(rows))}
