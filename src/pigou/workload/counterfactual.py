"""Rival policy: its choice at each recorded decision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pigou.config import ControlConfig
from pigou.control.messages import Choice
from pigou.control.plane import ControlPlane
from pigou.control.router import DecisionLedger, Explanation, Router
from pigou.control.routing.policy import load, override
from pigou.control.routing.selection import Softmax, select
from pigou.control.routing.view import FleetView
from pigou.request import Request


@dataclass(frozen=True, slots=True)
class Rival:
    """Routing of the rival; None keeps the journal's."""

    policy: str | None = None
    # parameters of the policy; without a policy they replace those of the run's.
    params: Mapping[str, Any] = field(default_factory=dict)
    temperature: float | None = None
    softmax: Softmax | None = None  # form of the choice
    seed: int | None = None


@dataclass(slots=True)
class PolicyComparison:
    """Choices of two policies in the same recorded states, without requests that failed early."""

    choices: int = 0
    other: int = 0  # choices where the rival differs
    moved: int = 0  # prefill local instead of remote, or the other way round
    # sum of the differences in price, the rival's less the recorded one's. A price is what a choice
    # costs its request and all others (`pigou.control.routing.toll.policy`).
    seconds: float = 0.0
    _open: dict[str, list[_Compared]] = field(default_factory=dict, repr=False)

    def add(self, request: str, why: Explanation, index: int) -> None:
        """Record a decision, and the rival's candidate index."""
        pairs = why.candidates
        before, after = pairs.prefill[why.chosen], pairs.prefill[index]
        compared = _Compared(
            int(index != why.chosen),
            int((before < 0) != (after < 0)),
            float(why.price[index] - why.price[why.chosen]),
        )
        self._open.setdefault(request, []).append(compared)

    def settle(self, request: str) -> None:
        """Count a request's choices."""
        for compared in self._open.pop(request, ()):
            self.choices += 1
            self.other += compared.other
            self.moved += compared.moved
            self.seconds += compared.seconds

    def settle_all(self) -> None:
        """Count the choices of all open requests."""
        for request in list(self._open):
            self.settle(request)

    def drop(self, request: str) -> None:
        """Discard a request's choices."""
        self._open.pop(request, None)


class _Compared(NamedTuple):
    """What one choice adds to a `PolicyComparison`."""

    other: int
    moved: int
    seconds: float


def rival(
    plane: ControlPlane, config: ControlConfig, other: Rival, into: PolicyComparison
) -> Router:
    """Return a router that chooses like the plane's new one, and compares."""
    return _CounterfactualRouter(plane.router, config, other, into)


class _CounterfactualRouter(Router):
    def __init__(
        self, first: Router, config: ControlConfig, other: Rival, into: PolicyComparison
    ) -> None:
        super().__init__(first.policy, config)
        self.ledger = DecisionLedger(max(1, config.max_decisions))
        if other.policy is None:
            self._rival = override(load(config.policy, config.params), other.params)
        else:
            self._rival = load(other.policy, other.params)
        given = other.temperature
        self._at = config.temperature if given is None else given
        self._form: Softmax = other.softmax or config.softmax
        seed = config.seed if other.seed is None else other.seed
        self._dice = np.random.default_rng(seed)
        self._into = into

    def choose(
        self, request: Request, fleet: FleetView, open_: NDArray[np.bool_],
        room: NDArray[np.bool_], now: int, sources: NDArray[np.bool_] | None = None,
    ) -> Choice | None:  # fmt: skip
        choice = super().choose(request, fleet, open_, room, now, sources)
        why = self.ledger.get(request.id)
        if choice is None or why is None or why.at != now:
            return choice
        costs = self._rival.costs(request, fleet, why.candidates)
        pick = select(costs, self._dice, self._at, self._form)
        if pick is not None:
            self._into.add(request.id, why, pick.index)
        return choice
