"""The paper's Eq. 1 with overlap counted for decode workers too."""

from __future__ import annotations

from typing import ClassVar, Self

from pigou.control.routing.dynamo_paper import DynamoPaper, DynamoPaperParams
from pigou.control.routing.policy import Costs, RequestView
from pigou.control.routing.stages import Rows, Stage
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

    def stage(
        self, request: RequestView, fleet: FleetView, rows: Rows, stage: Stage
    ) -> dict[str, Costs]:
        """Return `prefill` and `active`, in blocks, (rows,)."""
        return super().stage(request, fleet, rows, Stage.WHOLE if stage is Stage.DECODE else stage)
