"""The least predicted TTFT, fetching a prefix from where it is longest if that pays."""

from __future__ import annotations

from typing import ClassVar

import msgspec
import numpy as np

from pigou.config import check_fields
from pigou.control.routing.policy import Costs, RequestView
from pigou.control.routing.pool_policy import Pool, PoolPolicy, Rows
from pigou.control.routing.view import FleetView


class MooncakeParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `Mooncake`."""

    # ratio of the longest prefix to the worker's own from which the rest is fetched; infinity where
    # workers cannot fetch prefixes from one another.
    balancing_threshold: float = float("inf")
    ttft_slo: float = float("inf")  # seconds of TTFT above which a candidate is forbidden
    tbt_slo: float = float("inf")  # seconds between tokens above which a candidate is forbidden

    def __post_init__(self) -> None:
        check_fields(self, "balancing_threshold", ge=1, infinite=True)
        check_fields(self, "ttft_slo", "tbt_slo", ge=0, infinite=True)


class Mooncake(PoolPolicy):
    """TTFT_p = wait + prefill(own), or transfer(best - own) + wait + prefill(best), in seconds.

    own: prompt tokens held by p; best: the most held by any, used where best / own >=
    balancing_threshold. Pairs: TTFT for prefill, time between tokens (TBT) for decode; whole
    requests by their sum. Candidates that would miss an SLO are forbidden; if all would, the
    request queues. Mooncake (arXiv 2407.00079), Algorithm 1; times by
    `pigou.control.latency_model.estimates`.
    """

    name: ClassVar[str] = "mooncake"

    def __init__(self, params: MooncakeParams | None = None) -> None:
        self.params = params or MooncakeParams()

    def pool_costs(
        self, request: RequestView, fleet: FleetView, rows: Rows, pool: Pool
    ) -> dict[str, Costs]:
        """Return `wait`, `transfer`, `prefill` and `tbt`, in seconds, (rows,)."""
        parts: dict[str, Costs] = {}
        if pool is not Pool.DECODE:
            parts = self._ttft(request, fleet, rows)
            total = parts["wait"] + parts["transfer"] + parts["prefill"]
            parts["late"] = np.where(total > self.params.ttft_slo, np.inf, 0.0)
        if pool is not Pool.PREFILL:
            streams = fleet.decode_requests[rows].astype(np.float64)
            tbt = fleet.estimates.itl(rows, streams + 1.0)
            parts["tbt"] = tbt
            parts["slow"] = np.where(tbt > self.params.tbt_slo, np.inf, 0.0)
        return parts

    def _ttft(self, request: RequestView, fleet: FleetView, rows: Rows) -> dict[str, Costs]:
        known, own = fleet.estimates, fleet.cached(request.prompt)[rows].astype(np.float64)
        best = own.max()
        fetches = (own < best) & (best >= self.params.balancing_threshold * np.maximum(own, 1e-9))
        work = known.work(fleet.prefill_requests, fleet.prefill_tokens, fleet.prefill_pairs)
        held = np.where(fetches, best, own)
        return {
            "wait": work[rows],
            "transfer": np.where(fetches, known.transfer(rows, best - own), 0.0),
            "prefill": known.service(rows, request.prompt - held, request.prompt),
        }
