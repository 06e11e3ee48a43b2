"""NVIDIA Dynamo's conditional disaggregation."""

from __future__ import annotations

import copy
from typing import ClassVar, Literal

import numpy as np

from pigou.control.routing.conditional import Conditional, ConditionalParams
from pigou.control.routing.dynamo import Dynamo, DynamoParams
from pigou.control.routing.limits import at_least, finite, share
from pigou.control.routing.policy import RequestView, RoutingPolicy, override
from pigou.control.routing.view import Candidates, Flags, FleetView


class DynamoConditionalParams(
    ConditionalParams, frozen=True, forbid_unknown_fields=True, kw_only=True
):
    """Parameters of `DynamoConditional`, with Dynamo's names and defaults.

    Attributes:
        inner: policy that chooses among what is left.
        policy: which condition.
        eff_isl_threshold: uncached tokens from which a prompt is computed remotely.
        eff_isl_ratio_threshold: share of the prompt that is uncached from which it is.
        prefill_busy_threshold: batches of waiting tokens above which a prefill worker is busy;
            infinity never. Dynamo leaves it unset, with the same effect.
        max_num_batched_tokens: tokens of such a batch; Dynamo asks the worker for it.
        decode_busy_threshold: share of its blocks above which a decode worker takes no prompt;
            infinity never. A worker that did not say how many it has then takes none.
    """

    inner: str = "dynamo"
    policy: Literal["isl_bounding", "prefill_load", "isl_or_load"] = "isl_bounding"
    eff_isl_threshold: int = 2048
    eff_isl_ratio_threshold: float = 0.7
    prefill_busy_threshold: float = float("inf")
    max_num_batched_tokens: int = 8192
    decode_busy_threshold: float = float("inf")

    def __post_init__(self) -> None:
        finite(self, "eff_isl_threshold")
        share(self, "eff_isl_ratio_threshold")
        at_least(self, 0, "prefill_busy_threshold", "decode_busy_threshold")
        at_least(self, 1, "max_num_batched_tokens")


class DynamoConditional(Conditional):
    """The decode worker d computes the prompt itself when

        isl_bounding   e_d < 2048 tokens  and  e_d / prompt < 0.7
        prefill_load   waiting tokens of the chosen prefill worker
                       > prefill_busy_threshold * max_num_batched_tokens
        isl_or_load    either

    and never when its blocks, with this prompt's, exceed decode_busy_threshold of all it has.
    e_d = prompt - (device + 0.75 host + 0.25 disk) tokens held by d, with the weights of a
    `dynamo` inside. NVIDIA Dynamo, `lib/kv-router/src/conditional_disagg.rs` and its guide. The
    chosen prefill worker is that of the remote candidate that the policy inside likes best. A
    `dynamo` inside keeps its overlap credit when it chooses a decode worker, as Dynamo's does.
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
        found = np.zeros(len(fleet.ids), dtype=np.bool_)
        if kind != "prefill_load":
            found |= self._short(request, fleet)
        if kind != "isl_bounding" and self._prefill_busy(request, fleet, candidates):
            found[:] = True
        if self.params.decode_busy_threshold < float("inf"):
            blocks = fleet.active_blocks - (-request.prompt // fleet.block_size)
            found &= (fleet.blocks > 0) & (
                blocks <= self.params.decode_busy_threshold * fleet.blocks
            )
        return found

    def _short(self, request: RequestView, fleet: FleetView) -> Flags:
        own = self.params
        weights = self.inner.params if isinstance(self.inner, Dynamo) else DynamoParams()
        held = fleet.device + weights.host_cache_hit_weight * fleet.host
        held = (held + weights.disk_cache_hit_weight * fleet.storage) * fleet.block_size
        left = np.maximum(request.prompt - held, 0.0)
        found: Flags = left < own.eff_isl_threshold
        found &= left < own.eff_isl_ratio_threshold * request.prompt
        return found

    def _prefill_busy(self, request: RequestView, fleet: FleetView, candidates: Candidates) -> bool:
        most = self.params.prefill_busy_threshold * self.params.max_num_batched_tokens
        remote = candidates.prefill >= 0
        offered = Candidates(candidates.prefill[remote], candidates.decode[remote])
        # A look ahead must not use up the turns or draws of the choice itself.
        costs = copy.deepcopy(self.inner).costs(request, fleet, offered)
        return bool(fleet.prefill_tokens[offered.prefill[costs.argmin()]] > most)
