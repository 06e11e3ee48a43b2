"""Parameters of the price planner."""

from __future__ import annotations

import math

import msgspec


class PricePlannerParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `PricePlanner`. Values and prices are weighted seconds of delay a second."""

    gpu_price: float = 1.0
    # seconds of delay that a request outside its objective counts for, above 0.
    late_s: float = 60.0
    # for which a move is expected to last: the price of a move is spread over it.
    horizon_s: float = 600.0
    # share of load beyond the estimate that is planned for; a plan holds until the estimate leaves
    # it.
    up: float = 0.05
    # share by which load must have fallen below the plan before it is made smaller.
    down: float = 0.15
    # for which it must have fallen, half of it for half of the surplus; None for three start-ups,
    # at least 60: load that comes back costs a start, and requests that are late until then.
    hold_s: float | None = None
    # relative change of prompt or output lengths, or of speeds, that makes a new plan.
    mix: float = 0.1
    recovery_s: float = 60.0  # in which a backlog is to be worked off, at least two start-ups
    predictor: str = ""  # that widens the plan, by its name (`pigou.predictor`); "" for none
    trend: bool = True  # whether growing load is planned for as it will be when a start is ready
    flips: bool = True  # whether roles may change
    operating_points: bool = False  # whether `max_seqs` is set to what the objective of ITL allows

    def hold_seconds(self, start_up_s: float) -> float:
        """Return for how long load must have fallen, and a pool does not shrink after it grew."""
        return max(3.0 * start_up_s, 60.0) if self.hold_s is None else self.hold_s

    def __post_init__(self) -> None:
        for name in ("gpu_price", "late_s", "horizon_s", "recovery_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")
        for name in ("up", "down", "mix"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0, below 1")
        if self.hold_s is not None and not 0 <= self.hold_s < math.inf:
            raise ValueError(f"hold_s is {self.hold_s}; it must be at least 0")
