"""A policy for trials: the worker with the smallest number, whatever it has to do."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from pigou.control.routing.policy import Costs, RequestView
from pigou.control.routing.pool_policy import Pool, PoolPolicy, Rows
from pigou.control.routing.view import FleetView


class FirstWorker(PoolPolicy):
    """Send every request to the first worker of its pool: cost_i = i."""

    name: ClassVar[str] = "first"

    def pool_costs(
        self, request: RequestView, fleet: FleetView, rows: Rows, pool: Pool
    ) -> dict[str, Costs]:
        """Return the places of the workers in the pool, (rows,)."""
        return {"number": np.arange(len(rows), dtype=np.float64)}
