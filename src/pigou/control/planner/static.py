"""Pools of a fixed size."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from pigou.control.planner.planner import PlannerSetup
from pigou.control.planner.target_planner import TargetPlanner, supply
from pigou.windows.planner_window import PlannerWindow


class StaticParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `StaticPlanner`."""

    workers: int = 0  # of each pool; 0 for as many as it had at first
    repair: bool = True  # start workers anew for those that fail

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise ValueError(f"workers is {self.workers}; it must be at least 0")


class StaticPlanner(TargetPlanner):
    """wanted = workers, or as many as there were: a fleet without autoscaling.

    Without `workers`, a pool that somebody else makes larger stays so.
    """

    name: ClassVar[str] = "static"
    Params: ClassVar[type[msgspec.Struct]] = StaticParams

    def __init__(self, setup: PlannerSetup, params: StaticParams) -> None:
        super().__init__(setup)
        self.params = params
        self._sizes: dict[str, int] = {}

    def _targets(
        self,
        window: PlannerWindow,
        now_ns: int,  # noqa: ARG002
    ) -> tuple[dict[str, int], list[str]]:
        for pool in window.pools:
            size = self.params.workers or max(supply(pool), self._sizes.get(pool.name, 0))
            self._sizes[pool.name] = size
        return (dict(self._sizes) if self.params.repair else {}), []
