"""The cost that the paper gives for NVIDIA Dynamo's router."""

from __future__ import annotations

from typing import ClassVar

import msgspec
import numpy as np

from pigou.control.routing.limits import finite
from pigou.control.routing.policy import Costs, RequestView
from pigou.control.routing.stages import Rows, Stage, Staged
from pigou.control.routing.view import FleetView


class DynamoPaperParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `DynamoPaper`.

    Attributes:
        overlap_weight: omega, blocks in use that a block of prefill is worth; from 0.
    """

    overlap_weight: float = 1.0

    def __post_init__(self) -> None:
        finite(self, "overlap_weight")


class DynamoPaper(Staged):
    """cost_j = omega * prefill_j + active_j, in blocks.

    prefill_j are the blocks of the prompt that worker j would have to compute (a part of a block
    counts as one), active_j the KV blocks of the streams that it runs. Georgiou (2026), "The
    Price of Anarchy in Disaggregated Inference", Eq. 1; its temperature (Eq. 2) is the router's.
    The prompts that wait for worker j are not in it: `dynamo` counts them.

    Pairs: Eq. 1 chooses the prefill worker; the decode worker by active_j alone, since its blocks
    arrive by transfer.
    """

    name: ClassVar[str] = "dynamo-paper"

    def __init__(self, params: DynamoPaperParams | None = None) -> None:
        self.params = params or DynamoPaperParams()

    def stage(
        self, request: RequestView, fleet: FleetView, rows: Rows, stage: Stage
    ) -> dict[str, Costs]:
        """Return `prefill` and `active`, in blocks, (rows,)."""
        found = {"active": fleet.active_blocks[rows].astype(np.float64)}
        if stage is not Stage.DECODE:
            missing = -(-request.prompt // fleet.block_size[rows]) - fleet.overlap[rows]
            found["prefill"] = self.params.overlap_weight * np.maximum(missing, 0)
        return found
