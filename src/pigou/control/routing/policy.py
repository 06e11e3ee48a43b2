"""The interface of routing policies, and their registry."""

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
_MAX_WEIGHT = 1e9

RequestView: TypeAlias = Request
Costs: TypeAlias = NDArray[np.float64]


class RoutingPolicy(Protocol):
    """A formula over candidates.

    It may also have `parts(request, fleet, candidates)`, which returns the parts of the cost by
    name (`costs` is their sum, and is not asked for; None where it has none), and `note(request,
    fleet, candidates, chosen, parts)`, which takes the index of the candidate that was chosen.
    `costs` and `parts` must change nothing: they are also asked for without a choice.

    A policy with parameters keeps them in an attribute `params`, a frozen `msgspec.Struct` with
    defaults, and takes one as its only argument: then its parameters can be configured, and
    overridden for one request (`override`).
    """

    def costs(self, request: RequestView, fleet: FleetView, candidates: Candidates) -> Costs:
        """Return the cost of each candidate, shape (candidates,), in the policy's own unit.

        Lower is better; infinity forbids. Arrays of the view must not be written to, and not be
        kept: they change after the call.
        """
        ...


class CostTable(Mapping[str, Costs]):
    """Parts of the costs of candidates by name, (candidates,) each, in one array.

    `rows` has the parts in that order, and last their sum, shape (parts + 1, candidates).
    """

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


#: Parts of a cost by name, each of shape (candidates,).
CostParts: TypeAlias = Mapping[str, Costs]


def total(parts: CostParts, count: int) -> Costs:
    """Return the sum of parts of shape (count,); zeros where there are none."""
    if isinstance(parts, CostTable):
        return parts.total
    costs: Costs = sum(parts.values(), np.zeros(count))
    return costs


def costs_of(
    policy: RoutingPolicy, request: RequestView, fleet: FleetView, candidates: Candidates
) -> tuple[Costs, CostParts | None]:
    """Return what candidates cost, (candidates,), and its parts where the policy has any."""
    priced = getattr(policy, "parts", None)
    parts: CostParts | None = None if priced is None else priced(request, fleet, candidates)
    if parts is None:
        return policy.costs(request, fleet, candidates), None
    return total(parts, len(candidates)), parts


def params_of(policy: RoutingPolicy) -> Mapping[str, Any]:
    """Return the parameters of a policy by name; empty where it has none.

    A policy around another one, which it keeps in an attribute `inner`, has that one's too.
    """
    params = getattr(policy, "params", None)
    own = {} if params is None else msgspec.structs.asdict(params)
    inner = getattr(policy, "inner", None)
    return own if inner is None else {**params_of(inner), **own}


def param_of(policy: RoutingPolicy, name: str, default: Any) -> Any:
    """Return one parameter of a policy, or of the one inside it; the default where none has it."""
    inner_policy: RoutingPolicy | None = policy
    while inner_policy is not None:
        value = getattr(getattr(inner_policy, "params", None), name, None)
        if value is not None:
            return value
        inner_policy = getattr(inner_policy, "inner", None)
    return default


def override(policy: RoutingPolicy, values: Mapping[str, Any]) -> RoutingPolicy:
    """Return a policy with other parameters and the same state, or raise a ConfigError."""
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
    """Return a new policy by its name in the group `pigou.routing`, or raise a ConfigError."""
    policy: RoutingPolicy = named(GROUP, name, "policy")()
    return override(policy, params or {})


def check_minimum(params: msgspec.Struct, minimum: float, *names: str) -> None:
    """Raise a ValueError unless fields are numbers from `minimum` up; infinity is one."""
    for name in names:
        value = getattr(params, name)
        if not value >= minimum:
            raise ValueError(f"{name} is {value}; it must be a number from {minimum:g}")


def check_finite(params: msgspec.Struct, *names: str) -> None:
    """Raise a ValueError unless fields are numbers from 0 to 1e9: then every cost is finite."""
    for name in names:
        value = getattr(params, name)
        if not 0.0 <= value <= _MAX_WEIGHT:
            raise ValueError(f"{name} is {value}; it must be a number from 0 to {_MAX_WEIGHT:g}")


def check_share(params: msgspec.Struct, *names: str) -> None:
    """Raise a ValueError unless fields are shares, from 0 to 1."""
    for name in names:
        value = getattr(params, name)
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"{name} is {value}; it must be from 0 to 1")
