"""A control plane whose calls a cost meter follows: live, simulated, or replayed from a journal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pigou.config import ControlConfig
from pigou.control.messages import (
    Action,
    CacheChanged,
    CacheKeyed,
    Decision,
    LoadReport,
    Observation,
    Submit,
    Tick,
    Tokens,
)
from pigou.control.plane import ControlPlane
from pigou.control.routing.policy import RoutingPolicy
from pigou.cost.cost_meter import CostMeter
from pigou.request import Request

#: What says nothing of costs, and comes often.
_SILENT = (CacheChanged, CacheKeyed, LoadReport)


class MeteredControlPlane(ControlPlane):
    """A ControlPlane that tells a meter of each call; it decides as one without."""

    def __init__(
        self, config: ControlConfig, cost_meter: CostMeter, policy: RoutingPolicy | None = None
    ) -> None:
        """As `ControlPlane`."""
        super().__init__(config, policy)
        self.cost_meter = cost_meter

    def submit(self, request: Request, now: int, exclude: frozenset[str] = frozenset()) -> Decision:
        """As `ControlPlane.submit`."""
        decision = super().submit(request, now, exclude)
        self.cost_meter.follow(Submit(request), (decision,), now)
        return decision

    def observe(self, observation: Observation, now: int) -> Sequence[Decision]:
        """As `ControlPlane.observe`."""
        decisions = super().observe(observation, now)
        if decisions or type(observation) not in _SILENT:
            self.cost_meter.follow(observation, decisions, now)
        return decisions

    def on_tokens(self, slots: NDArray[np.int64], counts: NDArray[np.int64], now: int) -> None:
        """As `ControlPlane.on_tokens`."""
        super().on_tokens(slots, counts, now)
        pairs = zip(self.requests_in(slots), counts.tolist(), strict=True)
        self.cost_meter.follow(Tokens(tuple(pairs)), (), now)

    def tick(self, now: int) -> Sequence[Action]:
        """As `ControlPlane.tick`."""
        decisions = super().tick(now)
        self.cost_meter.follow(Tick(), decisions, now)
        return decisions
