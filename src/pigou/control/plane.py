"""ControlPlane: who runs where."""

from __future__ import annotations

from collections.abc import Sequence

from pigou.config import ControlConfig
from pigou.control.messages import Action, Decision, Observation
from pigou.request import Request


class ControlPlane:
    """Admission, routing and the fleet's state; a state machine without a clock."""

    def __init__(self, config: ControlConfig) -> None:
        raise AssertionError("signature only")

    def submit(self, request: Request, now: int, exclude: frozenset[str] = frozenset()) -> Decision:
        """Decide what becomes of a request; `exclude` names workers that just failed it."""
        raise AssertionError("signature only")

    def observe(self, observation: Observation, now: int) -> Sequence[Decision]:
        """Take in a fact; return the decisions that it sets free, for queued requests."""
        raise AssertionError("signature only")

    def tick(self, now: int) -> Sequence[Action]:
        """Let time pass: queued requests time out, estimates are renewed."""
        raise AssertionError("signature only")
