"""Cache affinity while load is even: Ray Serve's and SGLang's routers."""

from __future__ import annotations

from typing import ClassVar

import msgspec
import numpy as np

from pigou.config import check_fields
from pigou.control.routing.policy import (
    MAX_WEIGHT,
    Costs,
    RequestView,
)
from pigou.control.routing.pool_policy import Pool, PoolPolicy, Rows, pending
from pigou.control.routing.simple_policies import two_choices
from pigou.control.routing.view import FleetView


class RayPrefixParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `RayPrefix`, with its defaults."""

    imbalanced_threshold: float = 10.0  # requests between the longest and the shortest queue
    match_rate_threshold: float = 0.1  # share of the prompt that must be held for affinity to count

    def __post_init__(self) -> None:
        check_fields(self, "imbalanced_threshold", ge=0, infinite=True)
        check_fields(self, "match_rate_threshold", ge=0, le=1)


class RayPrefix(PoolPolicy):
    """Three cases, with L_i requests in flight and r_i the share of the prompt that i holds:

        max L - min L > imbalanced_threshold    two random choices by L_i
        max r >= match_rate_threshold           cost_i = tokens that i does not hold
        else                                    cost_i = requests ever sent to i
    Ray Serve's `PrefixCacheAffinityRouter`; the last case stands for its smallest prefix tree. The
    rule applies to each pool.
    """

    name: ClassVar[str] = "ray-prefix"

    def __init__(self, params: RayPrefixParams | None = None, seed: int = 0) -> None:
        self.params = params or RayPrefixParams()
        self._generator = np.random.default_rng(seed)

    def pool_costs(
        self, request: RequestView, fleet: FleetView, rows: Rows, pool: Pool
    ) -> dict[str, Costs]:
        """Return `requests`, `unmatched` tokens, or requests `served`, (rows,)."""
        load = pending(fleet, rows, pool)
        if int(load.max()) - int(load.min()) > self.params.imbalanced_threshold:
            return {"requests": two_choices(load, self._generator)}
        held = np.minimum(fleet.overlap[rows] * fleet.block_size[rows], request.prompt)
        if held.max() >= self.params.match_rate_threshold * request.prompt:
            return {"unmatched": (request.prompt - held).astype(np.float64)}
        return {"served": fleet.served[rows].astype(np.float64)}


class SglangCacheAwareParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `SglangCacheAware`, with the defaults of sglang-router 0.3.2."""

    cache_threshold: float = 0.3  # share of the prompt that must be held for affinity to count
    balance_abs_threshold: int = 64  # requests between the busiest and the idlest worker
    balance_rel_threshold: float = 1.5  # ratio between them

    def __post_init__(self) -> None:
        check_fields(self, "cache_threshold", ge=0, le=1)
        check_fields(self, "balance_abs_threshold", "balance_rel_threshold", ge=0, le=MAX_WEIGHT)


class SglangCacheAware(PoolPolicy):
    """Three cases, with L_i requests in flight and r_i the share of the prompt that i holds:

        max L - min L > abs  and  max L > rel min L    uneven: cost_i = L_i
        max r > cache_threshold                        cost_i = tokens that i does not hold
        else                                           cost_i = L_i
    SGLang's `sgl-model-gateway/src/policies/cache_aware.rs`, on held blocks in place of sent text.
    The rule applies to each pool.
    """

    name: ClassVar[str] = "sglang-cache-aware"

    def __init__(self, params: SglangCacheAwareParams | None = None) -> None:
        self.params = params or SglangCacheAwareParams()

    def pool_costs(
        self, request: RequestView, fleet: FleetView, rows: Rows, pool: Pool
    ) -> dict[str, Costs]:
        """Return `requests`, or `unmatched` tokens, (rows,)."""
        own = self.params
        load = pending(fleet, rows, pool)
        busiest, idlest = int(load.max()), int(load.min())
        uneven = busiest - idlest > own.balance_abs_threshold
        uneven = uneven and busiest > own.balance_rel_threshold * idlest
        held = np.minimum(fleet.overlap[rows] * fleet.block_size[rows], request.prompt)
        if uneven or held.max() <= own.cache_threshold * request.prompt:
            return {"requests": load.astype(np.float64)}
        return {"unmatched": (request.prompt - held).astype(np.float64)}
