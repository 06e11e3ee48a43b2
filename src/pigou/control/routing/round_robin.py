"""Each worker in turn."""

from __future__ import annotations

from typing import ClassVar

from pigou.control.routing.policy import Costs, RequestView
from pigou.control.routing.stages import Rows, Stage, Staged
from pigou.control.routing.view import FleetView


class RoundRobin(Staged):
    """Turns until it is worker i's again: cost_i = (i - next) mod workers.

    `next` moves past the worker of least cost at each decision, and each stage has its own, so
    prefill workers and decode workers take turns by themselves (the static proxies of vLLM's
    production stack). A worker that cannot be chosen is passed over. At a temperature above 0
    the turn counts as taken although another worker may have been drawn.
    """

    name: ClassVar[str] = "round-robin"

    def __init__(self) -> None:
        self._next = dict.fromkeys(Stage, 0)

    def stage(
        self,
        request: RequestView,  # noqa: ARG002
        fleet: FleetView,
        rows: Rows,
        stage: Stage,
    ) -> dict[str, Costs]:
        """Return the turns, (rows,)."""
        turns = (rows - self._next[stage]) % len(fleet.ids)
        self._next[stage] = int(rows[turns.argmin()]) + 1
        return {"turn": turns.astype(float)}
