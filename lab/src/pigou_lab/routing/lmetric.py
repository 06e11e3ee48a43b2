"""Work to compute, times work at hand."""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec
import numpy as np

from pigou.control.routing.policy import Costs, RequestView
from pigou.control.routing.pool_policy import Pool, PoolPolicy, Rows, pending
from pigou.control.routing.view import FleetView
from pigou.request import Counts


class LMetricParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `LMetric`."""

    # published port: `sglang` (llm-d's is the same but for ties) or `dynamo`.
    port: Literal["sglang", "dynamo"] = "sglang"


class LMetric(PoolPolicy):
    """cost_i = P_i * B_i: new prefill work on i, times the batch that it would join.

        sglang   u_i (L_i + 1), u_i uncached tokens, L_i requests in flight; ties by L_i
        dynamo   (Q_i + n - overlap_i) (D_i + 1), in blocks of queued prompts and of streams
    LMetric (arXiv 2603.15202), without weights; SGLang's
    `sgl-model-gateway/src/policies/lmetric.rs`, llm-d's `lmetric-scorer`. Pairs: `sglang` scores
    each pool alike; `dynamo` splits the factors.
    """

    name: ClassVar[str] = "lmetric"

    def __init__(self, params: LMetricParams | None = None) -> None:
        self.params = params or LMetricParams()

    def pool_costs(
        self, request: RequestView, fleet: FleetView, rows: Rows, pool: Pool
    ) -> dict[str, Costs]:
        """Return `product`, in token requests or block blocks, (rows,)."""
        if self.params.port == "dynamo":
            return {"product": _blocks(request, fleet, rows, pool)}
        load = pending(fleet, rows, pool)
        # Products are whole numbers, so a share under 1 only decides between equal ones.
        return {"product": uncached(request, fleet, rows) * (load + 1), "tie": load / (load + 1)}


def _blocks(request: RequestView, fleet: FleetView, rows: Rows, pool: Pool) -> Costs:
    size = fleet.block_size[rows]
    batch: Costs = active_blocks(fleet)[rows].astype(np.float64) + 1.0
    if pool is Pool.DECODE:
        return batch
    left = (fleet.prefill_tokens[rows] + request.prompt) / size - fleet.overlap[rows]
    work: Costs = np.maximum(left, 0.0)
    return work if pool is Pool.PREFILL else work * batch


def uncached(request: RequestView, fleet: FleetView, rows: Rows) -> Costs:
    """Return the uncached tokens of the prompt on workers, (rows,)."""
    tokens: Costs = (request.prompt - fleet.cached(request.prompt)[rows]).astype(np.float64)
    return tokens


def active_blocks(fleet: FleetView) -> Counts:
    """Return the KV blocks in use by streams of each worker, (workers,)."""
    blocks: Counts = -(-fleet.decode_tokens // fleet.block_size)
    return blocks
