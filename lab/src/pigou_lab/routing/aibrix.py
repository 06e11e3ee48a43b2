"""The longest prefix among workers that are not busier than most."""

from __future__ import annotations

from typing import ClassVar

import msgspec
import numpy as np

from pigou.config import check_fields
from pigou.control.routing.policy import MAX_WEIGHT, Costs, RequestView
from pigou.control.routing.pool_policy import Pool, PoolPolicy, Rows, pending
from pigou.control.routing.view import FleetView
from pigou.request import Counts, Flags


class AibrixPrefixParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `AibrixPrefix`, with its defaults."""

    # standard deviations above the mean load that a worker with a prefix may have.
    standard_deviation_factor: float = 1.0
    load_imbalance_factor: float = 2.0  # times the mean of the others that the busiest must exceed
    load_imbalance_min_gap: int = 8  # requests between the busiest and the idlest

    def __post_init__(self) -> None:
        check_fields(self, *self.__struct_fields__, ge=0, le=MAX_WEIGHT)


class AibrixPrefix(PoolPolicy):
    """With L_i requests in flight and m_i blocks of the prompt held:

        uneven   max L - min L >= gap  and  max L > factor (mean of the other L + 1)
                 (the gap alone between two workers): only the idlest may match
        match    among those with m_i > 0 and L_i <= mean + k sd: most m_i, then least L_i
        else     least L_i
    AIBrix, `pkg/plugins/gateway/algorithms/prefix_cache.go`, `imbalance_pods_filter.go`. The rule
    applies to each pool.
    """

    name: ClassVar[str] = "aibrix-prefix"

    def __init__(self, params: AibrixPrefixParams | None = None) -> None:
        self.params = params or AibrixPrefixParams()

    def pool_costs(
        self, request: RequestView, fleet: FleetView, rows: Rows, pool: Pool
    ) -> dict[str, Costs]:
        """Return `rank`, (rows,)."""
        load, held = pending(fleet, rows, pool), fleet.overlap[rows]
        mean = load.sum() / len(load)
        spread = np.sqrt(max(0.0, np.dot(load, load) / len(load) - mean * mean))
        allowed = load <= mean + self.params.standard_deviation_factor * spread
        matches: Flags = (held > 0) & allowed
        if self._uneven(load):
            matches &= load == load.min()
        blocks = request.prompt // int(fleet.block_size[rows].min()) + 1
        unmatched = np.where(matches, np.maximum(blocks - held, 0), blocks + 1)
        return {"rank": _ranked(unmatched.astype(np.float64), load.astype(np.float64))}

    def _uneven(self, load: Counts) -> bool:
        own, busiest = self.params, int(load.max())
        if busiest - int(load.min()) < own.load_imbalance_min_gap:
            return False
        if len(load) <= 2:
            return True
        others = (int(load.sum()) - busiest) / (len(load) - 1)
        return busiest > own.load_imbalance_factor * (others + 1.0)


def _ranked(first: Costs, second: Costs) -> Costs:
    """Return costs that order by integers `first`, then by integers `second`."""
    costs: Costs = first * (float(second.max(initial=0.0)) + 1.0) + second
    return costs
