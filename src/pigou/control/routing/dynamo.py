"""The cost that NVIDIA Dynamo 1.x computes."""

from __future__ import annotations

from typing import ClassVar

import msgspec
import numpy as np

from pigou.control.routing.dynamo_kernel import PARTS, whole
from pigou.control.routing.limits import finite
from pigou.control.routing.policy import Costs, RequestView, Table
from pigou.control.routing.stages import Rows, Stage, Staged
from pigou.control.routing.view import Candidates, FleetView


class DynamoParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `Dynamo`, with its names and defaults; all from 0.

    Attributes:
        prefill_load_scale: weight of the blocks to compute.
        overlap_score_credit: credit for a cached block in device memory.
        overlap_score_credit_decay: how fast a backlog of prompts takes that credit away.
        host_cache_hit_weight: credit for a block in host memory.
        disk_cache_hit_weight: credit for a block on disk or in an object store.
        decode_active_request_weight: blocks that each request in flight counts for besides.
        decode_overlap_score_credit: credit when a decode worker is chosen apart from the prefill
            worker; Dynamo sets it to 0, or leaves the credit where disaggregation is conditional.
    """

    prefill_load_scale: float = 1.0
    overlap_score_credit: float = 1.0
    overlap_score_credit_decay: float = 0.0
    host_cache_hit_weight: float = 0.75
    disk_cache_hit_weight: float = 0.25
    decode_active_request_weight: float = 0.0
    decode_overlap_score_credit: float = 0.0

    def __post_init__(self) -> None:
        finite(self, *self.__struct_fields__)


class Dynamo(Staged):
    """cost_i = s max(0, Q_i + n - credit_i) + (D_i + m) + w A_i, in blocks.

    For worker i: Q_i uncached tokens of its prompts that are not computed yet, in blocks; n the
    prompt in blocks; D_i blocks of its streams; m the blocks that the prompt will fill; A_i its
    requests in flight; s `prefill_load_scale`, w `decode_active_request_weight`;

        credit_i = c_i device_i + h host_i + k disk_i      (h 0.75, k 0.25)
        c_i = c / (1 + decay (Q_i - min over j of Q_j) / n)

    NVIDIA Dynamo 1.x, `lib/kv-router/src/scheduling/selector/default.rs` and its configuration
    guide. Its credit for a shared cache and its taints have nothing here to refer to; of the
    prompt's blocks it leaves out of m those that other streams of the worker fill already.

    Pairs: the prefill worker by s max(0, Q_p + n - credit_p); the decode worker by
    D_d + m + w A_d, or with a credit left by max(0, D_d + m - credit_d) + w A_d.
    """

    name: ClassVar[str] = "dynamo"

    def __init__(self, params: DynamoParams | None = None) -> None:
        self.params = params or DynamoParams()

    def table(self, request: RequestView, fleet: FleetView, candidates: Candidates) -> Table | None:
        """Return the parts and their sum in one array, quicker; None where it does not know how.

        It does for candidates that serve whole requests, without decay of the credit.
        """
        own = self.params
        if own.overlap_score_credit_decay > 0.0:
            return None
        found = np.empty((len(PARTS) + 1, len(candidates.decode)))
        done = whole(
            fleet.prefills, fleet.decodes, request.splits, candidates.prefill, candidates.decode,
            fleet.block_size, fleet.prefill_tokens, fleet.decode_tokens, fleet.decode_requests,
            fleet.device, fleet.host, fleet.storage, request.prompt,
            (
                own.prefill_load_scale, own.overlap_score_credit, own.host_cache_hit_weight,
                own.disk_cache_hit_weight, own.decode_active_request_weight,
            ),
            found,
        )  # fmt: skip
        return Table(PARTS, found) if done else None

    def stage(
        self, request: RequestView, fleet: FleetView, rows: Rows, stage: Stage
    ) -> dict[str, Costs]:
        """Return `prefill`, `decode` and `requests`, in blocks, (rows,)."""
        found: dict[str, Costs] = {}
        if stage is not Stage.DECODE:
            found["prefill"] = self._prefill(request, fleet, rows)
        if stage is not Stage.PREFILL:
            found["decode"] = self._decode(request, fleet, rows, stage)
            weight = self.params.decode_active_request_weight
            found["requests"] = weight * fleet.decode_requests[rows].astype(np.float64)
        return found

    def _prefill(self, request: RequestView, fleet: FleetView, rows: Rows) -> Costs:
        own = self.params
        size = fleet.block_size[rows]
        queued, prompt = fleet.prefill_tokens[rows] / size, request.prompt / size
        credit: Costs | float = own.overlap_score_credit
        if own.overlap_score_credit_decay > 0.0:
            excess = (queued - queued.min()) / np.ceil(prompt)
            credit = credit / (1.0 + own.overlap_score_credit_decay * excess)
        left = queued + prompt - self._credit(fleet, rows, credit)
        found: Costs = own.prefill_load_scale * np.maximum(left, 0.0)
        return found

    def _decode(self, request: RequestView, fleet: FleetView, rows: Rows, stage: Stage) -> Costs:
        size, credit = fleet.block_size[rows], self.params.decode_overlap_score_credit
        blocks = -(-fleet.decode_tokens[rows] // size) - (-request.prompt // size)
        if stage is Stage.DECODE and credit > 0.0:
            left: Costs = np.maximum(blocks - self._credit(fleet, rows, credit), 0.0)
            return left
        found: Costs = blocks.astype(np.float64)
        return found

    def _credit(self, fleet: FleetView, rows: Rows, device: Costs | float) -> Costs:
        own = self.params
        found: Costs = np.multiply(device, fleet.device[rows], dtype=np.float64)
        found += own.host_cache_hit_weight * fleet.host[rows]
        found += own.disk_cache_hit_weight * fleet.storage[rows]
        return found
