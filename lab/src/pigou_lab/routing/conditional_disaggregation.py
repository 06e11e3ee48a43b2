"""Conditional disaggregation: a threshold around another policy."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
import numpy as np

from pigou.control.routing.policy import (
    CostParts,
    Costs,
    CostTable,
    RequestView,
    RoutingPolicy,
    costs_of,
    load,
    total,
)
from pigou.control.routing.view import Candidates, FleetView
from pigou.request import Flags


class ConditionalDisaggregationParams(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True
):
    """Common parameters; those of the inner policy may be given beside them."""

    inner: str  # name of the policy that chooses among the candidates that are left


class ConditionalDisaggregation:
    """Forbids, per decode worker, local or remote prefill; `inner` prices the rest."""

    Params: ClassVar[type[ConditionalDisaggregationParams]]

    def __init__(self, params: ConditionalDisaggregationParams | None = None) -> None:
        self._params = params or self.Params()  # type: ignore[call-arg]
        self.inner = self.prepared(load(self._params.inner))

    @property
    def params(self) -> Any:
        """Parameters of the threshold; changing `inner` loads that policy."""
        return self._params

    @params.setter
    def params(self, params: Any) -> None:
        changed = params.inner != self._params.inner
        self._params = params
        if changed:
            self.inner = self.prepared(load(params.inner))

    def prepared(self, inner: RoutingPolicy) -> RoutingPolicy:
        """Return the inner policy as the peer system configures it."""
        return inner

    def local(self, request: RequestView, fleet: FleetView, candidates: Candidates) -> Flags:
        """Return which workers would compute the prompt locally, (workers,)."""
        raise NotImplementedError

    def costs(self, request: RequestView, fleet: FleetView, candidates: Candidates) -> Costs:
        """Return one cost per candidate, in the unit of the inner policy."""
        return total(self.parts(request, fleet, candidates), len(candidates))

    def parts(
        self, request: RequestView, fleet: FleetView, candidates: Candidates
    ) -> dict[str, Costs]:
        """Return the inner policy's parts, and `threshold`, which forbids."""
        allowed = self._allowed(request, fleet, candidates)
        left = Candidates(candidates.prefill[allowed], candidates.decode[allowed])
        costs, parts = costs_of(self.inner, request, fleet, left)
        whole: dict[str, Costs] = {}
        for name, part in (parts or {"cost": costs}).items():
            whole[name] = np.zeros(len(candidates))
            whole[name][allowed] = part
        whole["threshold"] = np.where(allowed, 0.0, np.inf)
        return whole

    def note(
        self, request: RequestView, fleet: FleetView, candidates: Candidates, chosen: int,
        parts: CostParts | None, /,
    ) -> None:  # fmt: skip
        """Pass the choice on to the inner policy."""
        note = getattr(self.inner, "note", None)
        if note is None or parts is None:
            return
        allowed = np.isfinite(parts["threshold"])
        left = Candidates(candidates.prefill[allowed], candidates.decode[allowed])
        own = None
        if getattr(self.inner, "parts", None) is not None:
            rows = {name: part[allowed] for name, part in parts.items() if name != "threshold"}
            own = CostTable(tuple(rows), np.array([*rows.values(), sum(rows.values())]))
        note(request, fleet, left, int(allowed[:chosen].sum()), own)

    def _allowed(self, request: RequestView, fleet: FleetView, candidates: Candidates) -> Flags:
        remote, decode = candidates.prefill >= 0, candidates.decode
        if not remote.any():
            return ~remote
        is_local, is_remote = np.zeros((2, len(fleet.ids)), dtype=np.bool_)
        is_local[decode[~remote]] = True
        is_remote[decode[remote]] = True
        both = is_local & is_remote
        if not both.any():
            return np.ones(len(candidates), dtype=np.bool_)
        local = self.local(request, fleet, candidates)[decode]
        allowed: Flags = ~both[decode] | (local != remote)
        return allowed
