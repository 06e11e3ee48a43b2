"""The interface of routing policies, and their registry."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

import msgspec
import numpy as np
from numpy.typing import NDArray

from pigou.config import ConfigError, named, wrong
from pigou.control.routing.view import Candidates, FleetView
from pigou.request import Request

GROUP = "pigou.routing"
#: Weights up to here leave every cost a finite number.
_MAX_WEIGHT = 1e9

RequestView: TypeAlias = Request
Costs: TypeAlias = NDArray[np.float64]


class RoutingPolicy(Protocol):
    """A formula over candidates.

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


@runtime_checkable
class Priced(Protocol):
    """A policy whose cost is a sum of parts, which explain its decisions."""

    def parts(
        self, request: RequestView, fleet: FleetView, candidates: Candidates
    ) -> dict[str, Costs]:
        """Return the parts by name, each of shape (candidates,); `costs` is their sum."""
        ...


#: The method `parts` of a `Priced` policy.
Parts: TypeAlias = Callable[[RequestView, FleetView, Candidates], dict[str, Costs]]


def total(parts: Mapping[str, Costs], count: int) -> Costs:
    """Return the sum of parts of shape (count,); zeros where there are none."""
    costs: Costs = sum(parts.values(), np.zeros(count))
    return costs


class CostTable(msgspec.Struct):
    """Parts of the costs of candidates in one array, for policies that fill it in one go.

    Attributes:
        names: of the parts.
        rows: the parts in that order, and last their sum, shape (parts + 1, candidates).
    """

    names: tuple[str, ...]
    rows: Costs

    @property
    def total(self) -> Costs:
        """The costs, (candidates,)."""
        costs: Costs = self.rows[-1]
        return costs

    @property
    def parts(self) -> dict[str, Costs]:
        """The parts by name, (candidates,) each."""
        return dict(zip(self.names, self.rows, strict=False))


def params_of(policy: RoutingPolicy) -> Mapping[str, Any]:
    """Return the parameters of a policy by name; empty where it has none.

    A policy around another one, which it keeps in an attribute `inner`, has that one's too.
    """
    params = getattr(policy, "params", None)
    own = {} if params is None else msgspec.structs.asdict(params)
    inner = getattr(policy, "inner", None)
    return own if inner is None else {**params_of(inner), **own}


def override(policy: RoutingPolicy, values: Mapping[str, Any]) -> RoutingPolicy:
    """Return a policy with some parameters replaced; state that it keeps is shared.

    Raises:
        ConfigError: it has no parameter of that name, or the value does not fit.
    """
    if not values:
        return policy
    params = getattr(policy, "params", None)
    known = {} if params is None else msgspec.structs.asdict(params)
    own = {name: value for name, value in values.items() if name in known}
    rest = {name: value for name, value in values.items() if name not in known}
    other = copy.copy(policy)
    if own:
        other.params = _converted(type(params), known, own)  # type: ignore[attr-defined]
    inner = getattr(other, "inner", None)
    if rest and inner is not None and rest.keys() <= params_of(inner).keys():
        other.inner = override(inner, rest)  # type: ignore[attr-defined]
    elif rest:
        names = ", ".join(sorted(params_of(other))) or "none"
        unknown = min(rest.keys() - params_of(other).keys())
        raise ConfigError(f"{unknown} is no parameter of the routing policy; it has: {names}")
    return other


def _converted(kind: Any, known: Mapping[str, Any], values: Mapping[str, Any]) -> Any:
    try:
        return msgspec.convert({**known, **values}, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"policy parameters: {wrong(error, kind, {**known, **values})}") from None


def load(name: str, params: Mapping[str, Any] | None = None) -> RoutingPolicy:
    """Return a new policy by its name in the entry point group `pigou.routing`.

    Raises:
        ConfigError: there is none of that name (the message lists those that there are), or it
            has no such parameter.
    """
    policy: RoutingPolicy = named(GROUP, name, "policy")()
    return override(policy, params or {})


def check_minimum(params: msgspec.Struct, minimum: float, *names: str) -> None:
    """Check that fields are numbers from `minimum` up; infinity is one.

    Raises:
        ValueError: one is not.
    """
    for name in names:
        value = getattr(params, name)
        if not value >= minimum:
            raise ValueError(f"{name} is {value}; it must be a number from {minimum:g}")


def check_finite(params: msgspec.Struct, *names: str) -> None:
    """Check that fields are numbers from 0 to 1e9, with which every cost is finite.

    Raises:
        ValueError: one is not.
    """
    for name in names:
        value = getattr(params, name)
        if not 0.0 <= value <= _MAX_WEIGHT:
            raise ValueError(f"{name} is {value}; it must be a number from 0 to {_MAX_WEIGHT:g}")


def check_share(params: msgspec.Struct, *names: str) -> None:
    """Check that fields are shares, from 0 to 1.

    Raises:
        ValueError: one is not.
    """
    for name in names:
        value = getattr(params, name)
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"{name} is {value}; it must be from 0 to 1")
