"""NVIDIA Dynamo's routing: the cost of 1.x, its conditional disaggregation, the paper's Eq. 1."""

from __future__ import annotations

import copy
from typing import ClassVar, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from pigou.compiled import bare_kernel
from pigou.config import check_fields
from pigou.control.routing.policy import (
    MAX_WEIGHT,
    CostParts,
    Costs,
    CostTable,
    RequestView,
    RoutingPolicy,
    override,
)
from pigou.control.routing.pool_policy import Pool, PoolPolicy, Rows
from pigou.control.routing.view import Candidates, FleetView
from pigou.request import Counts, Flags
from pigou_lab.routing.conditional_disaggregation import (
    ConditionalDisaggregation,
    ConditionalDisaggregationParams,
)
from pigou_lab.routing.lmetric import active_blocks

#: Names of the parts of `Dynamo`, and the rows that `aggregated_costs` writes.
PARTS = ("prefill", "decode", "requests")
PREFILL, DECODE, REQUESTS, TOTAL = range(4)


@bare_kernel
def aggregated_costs(
    roles: tuple[Flags, Flags],
    splits: bool,
    candidates: tuple[NDArray[np.int32], NDArray[np.int32]],
    block_size: Counts,
    load: tuple[Counts, Counts, Counts],
    tiers: tuple[Counts, Counts, Counts],
    prompt: int,
    weights: tuple[float, float, float, float, float],
    costs: NDArray[np.float64],
) -> bool:
    """Write each candidate's cost parts and their sum; return False if pools are chosen apart.

    Args:
        roles: prefill and decode flags, (workers,).
        candidates: their prefill (-1: local) and decode workers, (candidates,) each.
        load: `prefill_tokens`, `decode_tokens`, `decode_requests` of `FleetView`, (workers,) each.
        tiers: cached blocks on device, host and disk, (workers,) each.
        weights: per block to compute, per cached block of each tier, per request.
        costs: output, `PARTS` and the sum, shape (4, candidates).
    """
    prefills, decodes = roles
    prefill, decode = candidates
    prefill_tokens, decode_tokens, decode_requests = load
    device, host, storage = tiers
    scale, device_credit, host_credit, storage_credit, request_weight = weights
    for i in range(prefill.shape[0]):
        if prefill[i] >= 0:
            return False
    if splits:
        for w in range(prefills.shape[0]):
            if prefills[w] != decodes[w]:
                return False
    for i in range(decode.shape[0]):
        w = decode[i]
        size = block_size[w]
        credit = device_credit * device[w]
        credit += host_credit * host[w]
        credit += storage_credit * storage[w]
        left = prefill_tokens[w] / size + prompt / size - credit
        blocks = -(-decode_tokens[w] // size) - (-prompt // size)
        costs[PREFILL, i] = scale * max(left, 0.0)
        costs[DECODE, i] = float(blocks)
        costs[REQUESTS, i] = request_weight * float(decode_requests[w])
        # In the order of the rows, so that later sums of the parts are the same.
        costs[TOTAL, i] = costs[PREFILL, i] + costs[DECODE, i] + costs[REQUESTS, i]
    return True


class DynamoParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `Dynamo`, with its names and defaults; all from 0."""

    prefill_load_scale: float = 1.0  # weight of the blocks to compute
    overlap_score_credit: float = 1.0  # credit for a cached block in device memory
    overlap_score_credit_decay: float = 0.0  # how fast a backlog of prompts takes that credit away
    host_cache_hit_weight: float = 0.75  # credit for a block in host memory
    disk_cache_hit_weight: float = 0.25  # credit for a block on disk or in an object store
    # blocks that each request in flight counts for besides.
    decode_active_request_weight: float = 0.0
    # credit when a decode worker is chosen apart from the prefill worker; Dynamo sets it to 0, or
    # leaves the credit where disaggregation is conditional.
    decode_overlap_score_credit: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self, *self.__struct_fields__, ge=0, le=MAX_WEIGHT)


class Dynamo(PoolPolicy):
    """cost_i = s max(0, Q_i + n - credit_i) + (D_i + m) + w A_i, in blocks.

        credit_i = c_i device_i + h host_i + k disk_i      (h 0.75, k 0.25)
        c_i = c / (1 + decay (Q_i - min over j of Q_j) / n)
    Q_i: queued uncached prompt blocks; n: the prompt's; D_i: blocks of streams; m: blocks the
    prompt will fill; A_i: requests in flight; s `prefill_load_scale`, w
    `decode_active_request_weight`. Pairs: prefill by s max(0, Q_p + n - credit_p), decode by max(0,
    D_d + m - credit left) + w A_d. NVIDIA Dynamo 1.x,
    `lib/kv-router/src/scheduling/selector/default.rs`, without its shared cache and taints.
    """

    name: ClassVar[str] = "dynamo"

    def __init__(self, params: DynamoParams | None = None) -> None:
        self.params = params or DynamoParams()

    def parts(self, request: RequestView, fleet: FleetView, candidates: Candidates) -> CostParts:
        """Return the cost parts, by kernel for aggregated serving without decay."""
        own = self.params
        if own.overlap_score_credit_decay > 0.0 or type(self) is not Dynamo:
            return super().parts(request, fleet, candidates)
        costs = np.empty((len(PARTS) + 1, len(candidates.decode)))
        done = aggregated_costs(
            (fleet.prefills, fleet.decodes),
            request.splits,
            (candidates.prefill, candidates.decode),
            fleet.block_size,
            (fleet.prefill_tokens, fleet.decode_tokens, fleet.decode_requests),
            (fleet.device, fleet.host, fleet.storage),
            request.prompt,
            (
                own.prefill_load_scale, own.overlap_score_credit, own.host_cache_hit_weight,
                own.disk_cache_hit_weight, own.decode_active_request_weight,
            ),
            costs,
        )  # fmt: skip
        return CostTable(PARTS, costs) if done else super().parts(request, fleet, candidates)

    def pool_costs(
        self, request: RequestView, fleet: FleetView, rows: Rows, pool: Pool
    ) -> dict[str, Costs]:
        """Return `prefill`, `decode` and `requests`, in blocks, (rows,)."""
        parts: dict[str, Costs] = {}
        if pool is not Pool.DECODE:
            parts["prefill"] = self._prefill(request, fleet, rows)
        if pool is not Pool.PREFILL:
            parts["decode"] = self._decode(request, fleet, rows, pool)
            weight = self.params.decode_active_request_weight
            parts["requests"] = weight * fleet.decode_requests[rows].astype(np.float64)
        return parts

    def _prefill(self, request: RequestView, fleet: FleetView, rows: Rows) -> Costs:
        own = self.params
        size = fleet.block_size[rows]
        queued, prompt = fleet.prefill_tokens[rows] / size, request.prompt / size
        credit: Costs | float = own.overlap_score_credit
        if own.overlap_score_credit_decay > 0.0:
            excess = (queued - queued.min()) / np.ceil(prompt)
            credit = credit / (1.0 + own.overlap_score_credit_decay * excess)
        left = queued + prompt - self._credit(fleet, rows, credit)
        costs: Costs = own.prefill_load_scale * np.maximum(left, 0.0)
        return costs

    def _decode(self, request: RequestView, fleet: FleetView, rows: Rows, pool: Pool) -> Costs:
        size, credit = fleet.block_size[rows], self.params.decode_overlap_score_credit
        blocks = -(-fleet.decode_tokens[rows] // size) - (-request.prompt // size)
        if pool is Pool.DECODE and credit > 0.0:
            left: Costs = np.maximum(blocks - self._credit(fleet, rows, credit), 0.0)
            return left
        costs: Costs = blocks.astype(np.float64)
        return costs

    def _credit(self, fleet: FleetView, rows: Rows, device: Costs | float) -> Costs:
        own = self.params
        credit: Costs = np.multiply(device, fleet.device[rows], dtype=np.float64)
        credit += own.host_cache_hit_weight * fleet.host[rows]
        credit += own.disk_cache_hit_weight * fleet.storage[rows]
        return credit


class DynamoConditionalParams(
    ConditionalDisaggregationParams, frozen=True, forbid_unknown_fields=True, kw_only=True
):
    """Parameters of `DynamoConditional`, with Dynamo's names and defaults."""

    inner: str = "dynamo"  # policy that chooses among what is left
    policy: Literal["isl_bounding", "prefill_load", "isl_or_load"] = "isl_bounding"
    eff_isl_threshold: int = 2048  # uncached tokens from which a prompt is computed remotely
    eff_isl_ratio_threshold: float = 0.7  # share of the prompt that is uncached from which it is
    # batches of waiting tokens above which a prefill worker is busy; infinity never. Dynamo leaves
    # it unset, with the same effect.
    prefill_busy_threshold: float = float("inf")
    max_num_batched_tokens: int = 8192  # tokens of such a batch; Dynamo asks the worker for it
    # share of its blocks above which a decode worker takes no prompt; infinity never. A worker that
    # did not say how many it has then takes none.
    decode_busy_threshold: float = float("inf")

    def __post_init__(self) -> None:
        check_fields(self, "eff_isl_threshold", ge=0, le=MAX_WEIGHT)
        check_fields(self, "eff_isl_ratio_threshold", ge=0, le=1)
        check_fields(self, "prefill_busy_threshold", "decode_busy_threshold", ge=0, infinite=True)
        check_fields(self, "max_num_batched_tokens", ge=1, infinite=True)


class DynamoConditional(ConditionalDisaggregation):
    """The decode worker d computes the prompt itself when

        isl_bounding   e_d < 2048 tokens  and  e_d / prompt < 0.7
        prefill_load   waiting tokens of the chosen prefill worker
                       > prefill_busy_threshold * max_num_batched_tokens
        isl_or_load    either
    unless its blocks, with this prompt's, exceed decode_busy_threshold of its memory. e_d = prompt
    - (device + 0.75 host + 0.25 disk) tokens held by d. The inner policy chooses the prefill
    worker. NVIDIA Dynamo, `lib/kv-router/src/conditional_disagg.rs` and its guide.
    """

    name: ClassVar[str] = "dynamo-conditional"
    Params = DynamoConditionalParams

    def prepared(self, inner: RoutingPolicy) -> RoutingPolicy:
        """Leave the overlap credit of `dynamo` to the choice of the decode worker."""
        if isinstance(inner, Dynamo):
            credit = inner.params.overlap_score_credit
            return override(inner, {"decode_overlap_score_credit": credit})
        return inner

    def local(self, request: RequestView, fleet: FleetView, candidates: Candidates) -> Flags:
        """Return whether each worker would compute the prompt itself, (workers,)."""
        kind = self.params.policy
        local = np.zeros(len(fleet.ids), dtype=np.bool_)
        if kind != "prefill_load":
            local |= self._short(request, fleet)
        if kind != "isl_bounding" and self._prefill_busy(request, fleet, candidates):
            local[:] = True
        if self.params.decode_busy_threshold < float("inf"):
            blocks = active_blocks(fleet) - (-request.prompt // fleet.block_size)
            local &= (fleet.blocks > 0) & (
                blocks <= self.params.decode_busy_threshold * fleet.blocks
            )
        return local

    def _short(self, request: RequestView, fleet: FleetView) -> Flags:
        own = self.params
        weights = self.inner.params if isinstance(self.inner, Dynamo) else DynamoParams()
        held = fleet.device + weights.host_cache_hit_weight * fleet.host
        held = (held + weights.disk_cache_hit_weight * fleet.storage) * fleet.block_size
        left = np.maximum(request.prompt - held, 0.0)
        short: Flags = left < own.eff_isl_threshold
        short &= left < own.eff_isl_ratio_threshold * request.prompt
        return short

    def _prefill_busy(self, request: RequestView, fleet: FleetView, candidates: Candidates) -> bool:
        limit = self.params.prefill_busy_threshold * self.params.max_num_batched_tokens
        remote = candidates.prefill >= 0
        remote_candidates = Candidates(candidates.prefill[remote], candidates.decode[remote])
        # A look ahead must not use up the turns or draws of the choice itself.
        costs = copy.deepcopy(self.inner).costs(request, fleet, remote_candidates)
        return bool(fleet.prefill_tokens[remote_candidates.prefill[costs.argmin()]] > limit)


class DynamoPaperParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `DynamoPaper`."""

    overlap_weight: float = 1.0  # omega, blocks in use that a block of prefill is worth; from 0

    def __post_init__(self) -> None:
        check_fields(self, "overlap_weight", ge=0, le=MAX_WEIGHT)


class DynamoPaper(PoolPolicy):
    """cost_j = omega * prefill_j + active_j, in blocks.

    prefill_j: prompt blocks to compute, rounded up; active_j: KV blocks of running streams. Queued
    prompts are not counted. Pairs: Eq. 1 for prefill, active_j alone for decode. Georgiou (2026),
    "The Price of Anarchy in Disaggregated Inference", Eq. 1.
    """

    name: ClassVar[str] = "dynamo-paper"

    def __init__(self, params: DynamoPaperParams | None = None) -> None:
        self.params = params or DynamoPaperParams()

    def pool_costs(
        self, request: RequestView, fleet: FleetView, rows: Rows, pool: Pool
    ) -> dict[str, Costs]:
        """Return `prefill` and `active`, in blocks, (rows,)."""
        parts = {"active": active_blocks(fleet)[rows].astype(np.float64)}
        if pool is not Pool.DECODE:
            missing = -(-request.prompt // fleet.block_size[rows]) - fleet.overlap[rows]
            parts["prefill"] = self.params.overlap_weight * np.maximum(missing, 0)
        return parts
