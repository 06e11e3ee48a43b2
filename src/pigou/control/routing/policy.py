"""Interface of routing policies, and their registry."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from pigou.config import ConfigError
from pigou.control.routing.view import Candidates, FleetView
from pigou.registry import named, read_struct
from pigou.request import Request

GROUP = "pigou.routing"
#: Weights up to here leave every cost a finite number.
MAX_WEIGHT = 10**9

RequestView: TypeAlias = Request
Costs: TypeAlias = NDArray[np.float64]
#: Parts of a cost by name, each of shape (candidates,).
CostParts: TypeAlias = Mapping[str, Costs]


class RoutingPolicy(Protocol):
    """A cost formula over candidates.

    Optional methods: `parts(request, fleet, candidates)` returns costs by part, or None, and
    `note(request, fleet, candidates, chosen, parts)` records a choice. `costs` and `parts` must not
    change state. Parameters are a frozen `msgspec.Struct` in `params`, the only argument.
    """

    def costs(self, request: RequestView, fleet: FleetView, candidates: Candidates) -> Costs:
        """Return candidates' costs, (candidates,); infinity forbids. Views are read-only."""
        ...


class CostTable(Mapping[str, Costs]):
    """Parts of the costs by name, and their sum last: `rows` is (parts + 1, candidates)."""

    __slots__ = ("names", "rows")

    def __init__(self, names: tuple[str, ...], rows: Costs) -> None:
        self.names, self.rows = names, rows

    @property
    def total(self) -> Costs:
        """The costs, (candidates,)."""
        costs: Costs = self.rows[-1]
        return costs

    def __getitem__(self, name: str) -> Costs:
        if name not in self.names:
            raise KeyError(name)
        part: Costs = self.rows[self.names.index(name)]
        return part

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def total(parts: CostParts, count: int) -> Costs:
    """Return the sum of parts, shape (count,); zeros for none."""
    if type(parts) is CostTable:  # `isinstance` of a Mapping is slow
        return parts.total
    costs: Costs = sum(parts.values(), np.zeros(count))
    return costs


def costs_of(
    policy: RoutingPolicy, request: RequestView, fleet: FleetView, candidates: Candidates
) -> tuple[Costs, CostParts | None]:
    """Return the costs of candidates, (candidates,), and their parts or None."""
    priced = getattr(policy, "parts", None)
    parts: CostParts | None = None if priced is None else priced(request, fleet, candidates)
    if parts is None:
        return policy.costs(request, fleet, candidates), None
    return total(parts, len(candidates)), parts


def params_of(policy: RoutingPolicy) -> Mapping[str, Any]:
    """Return a policy's parameters by name, those of an `inner` policy included."""
    params = getattr(policy, "params", None)
    own = {} if params is None else msgspec.structs.asdict(params)
    inner = getattr(policy, "inner", None)
    return own if inner is None else {**params_of(inner), **own}


def override(policy: RoutingPolicy, values: Mapping[str, Any]) -> RoutingPolicy:
    """Return a policy with other parameters and shared state; raises ConfigError."""
    if not values:
        return policy
    params = getattr(policy, "params", None)
    known = {} if params is None else msgspec.structs.asdict(params)
    own = {name: value for name, value in values.items() if name in known}
    rest = {name: value for name, value in values.items() if name not in known}
    other = copy.copy(policy)
    if own:
        kind: Any = type(params)
        other.params = read_struct("policy parameters", kind, {**known, **own})  # type: ignore[attr-defined]
    inner = getattr(other, "inner", None)
    if rest and inner is not None and rest.keys() <= params_of(inner).keys():
        other.inner = override(inner, rest)  # type: ignore[attr-defined]
    elif rest:
        names = ", ".join(sorted(params_of(other))) or "none"
        unknown = min(rest.keys() - params_of(other).keys())
        raise ConfigError(f"{unknown} is no parameter of the routing policy; it has: {names}")
    return other


def load(name: str, params: Mapping[str, Any] | None = None) -> RoutingPolicy:
    """Build a policy by name from the group `pigou.routing`; raises ConfigError."""
    policy: RoutingPolicy = named(GROUP, name, "policy")()
    return override(policy, params or {})
