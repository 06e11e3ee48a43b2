"""The router: candidates, their costs under the policy, and the choice."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from pigou.config import ConfigError, ControlConfig
from pigou.control.candidates import candidates
from pigou.control.decisions import Ledger, explain
from pigou.control.messages import Choice
from pigou.control.routing.policy import Parts, RoutingPolicy, override, params_of
from pigou.control.routing.selection import select
from pigou.control.routing.toll import Toll
from pigou.control.routing.view import FleetView
from pigou.request import Request

TEMPERATURE = "temperature"
#: Dynamo 1.x made its overlap weight an alias of the scale of prefill load.
OTHER_NAMES = {"overlap_weight": "prefill_load_scale"}


class Router:
    """Chooses workers by a policy, at a temperature.

    Both may be set anew at any time (`tune`), and for one request (`Request.overrides`).

    Attributes:
        policy: the policy; `name` is what it was found by.
        temperature: of the choice; 0 takes the cheapest.
        regime: of the fleet, as decisions are to tell.
        ledger: of the last decisions.
    """

    def __init__(self, policy: RoutingPolicy, config: ControlConfig) -> None:
        self.policy = policy
        self.name = config.policy
        self.temperature = config.temperature
        self.regime = ""
        self.ledger = Ledger(config.max_decisions)
        self._softmax = config.softmax
        self._price = Toll()
        self._generator = np.random.default_rng(config.seed)

    def check(self, overrides: Mapping[str, float]) -> None:
        """Refuse overrides that could not be honoured.

        Raises:
            ConfigError: an unknown name, or a value out of range.
        """
        self._with(overrides)

    def tune(self, temperature: float, parameters: Mapping[str, float]) -> None:
        """Set the temperature, and those of the parameters that the policy has.

        Where it has another name for one (`OTHER_NAMES`), that is set.
        """
        known = params_of(self.policy)
        self.temperature = temperature
        values = {}
        for name, value in parameters.items():
            theirs = name if name in known else OTHER_NAMES.get(name, "")
            if theirs in known:
                values[theirs] = value
        self.policy = override(self.policy, values)

    def choose(
        self, request: Request, fleet: FleetView, open_: NDArray[np.bool_],
        room: NDArray[np.bool_], now: int,
    ) -> Choice | None:  # fmt: skip
        """Choose workers for a request; None when none can take it.

        Args:
            request: the request.
            fleet: as this request sees it.
            open_: workers that may be used, (workers,).
            room: workers that can take one more stream, (workers,).
            now: nanoseconds.
        """
        found = candidates(request, fleet, open_, room)
        if len(found) == 0:
            return None
        policy, temperature = self._with(request.overrides)
        split: Parts | None = getattr(policy, "parts", None)
        if split is not None:
            parts = split(request, fleet, found)
            costs = sum(parts.values(), np.zeros(len(found)))
        else:
            parts, costs = {}, policy.costs(request, fleet, found)
        pick = select(costs, self._generator, temperature, self._softmax)
        if pick is None:
            return None
        own = isinstance(policy, Toll) and policy.params == self._price.params
        prices = parts if own else self._price.parts(request, fleet, found)
        explanation = explain(
            request,
            now,
            self.name,
            temperature,
            self.regime,
            pick.index,
            fleet,
            found,
            costs,
            parts,
            prices,
        )
        self.ledger.add(explanation)
        return explanation.choice

    def _with(self, overrides: Mapping[str, float]) -> tuple[RoutingPolicy, float]:
        if not overrides:
            return self.policy, self.temperature
        rest = dict(overrides)
        temperature = rest.pop(TEMPERATURE, self.temperature)
        if not 0.0 <= temperature < float("inf"):
            raise ConfigError(f"temperature is {temperature}; it must be a finite number from 0")
        return override(self.policy, rest), temperature
