"""The paper's Eq. 1 with overlap counted for decode workers too."""

from __future__ import annotations

from typing import ClassVar, Self

from pigou.control.routing.policy import Costs, RequestView
from pigou.control.routing.pool_policy import Pool, Rows
from pigou.control.routing.rivals.dynamo import DynamoPaper, DynamoPaperParams
from pigou.control.routing.view import FleetView


class EqualStages(DynamoPaper):
    """cost_j = omega * prefill_j + active_j, for prefill and for decode workers alike.

    `dynamo-paper` leaves overlap out where decode workers are chosen, since blocks come by
    transfer. The paper's routing game has them as resources with overlaps (its Eq. 7); this is
    the form in which its overlap weight can have an effect at all with one prefill worker.
    """

    name: ClassVar[str] = "eq1"

    @classmethod
    def weighing(cls, overlap_weight: float) -> Self:
        """Return one with this omega."""
        return cls(DynamoPaperParams(overlap_weight=overlap_weight))

    def pool_costs(
        self, request: RequestView, fleet: FleetView, rows: Rows, pool: Pool
    ) -> dict[str, Costs]:
        """Return `prefill` and `active`, in blocks, (rows,)."""
        return super().pool_costs(
            request, fleet, rows, Pool.AGGREGATED if pool is Pool.DECODE else pool
        )
