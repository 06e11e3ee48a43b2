"""The price of a worker, as a sum of terms in weighted seconds of delay a second.

    net = saved - rent - moved / horizon_s

| symbol | meaning | from |
|---|---|---|
| lambda | planned requests a second | `load_band` |
| R_P, R_D, R_B | requests a second that prefill, decode and mixed pools serve inside the objective | `pigou.performance.capacity` |
| g | goodput | `goodput` |
| w | mean weight of the requests | their classes |
| m, p_L | margin of capacity, seconds of delay that a late request is charged | `late_price` |
| G | GPUs | the split |
| p | price of a GPU: `gpu_price`, or the shadow price of the budget where that is higher | `frontier` |
| u, d, f | seconds of a start-up, a drain and a flip | `ProvisioningTimes` |
| C, h, s | cached tokens of a worker, share of prompt tokens that hits, seconds of a token | windows, the model |
| n | streams of a worker | windows |
| x | share of a prompt's uncached tokens that routes want computed by prefill workers | windows |

Pools get the GPUs where the sum is largest (`frontier`), and one price clears the budget.
"""  # noqa: E501

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from pigou.config import check_bounds, check_fields

if TYPE_CHECKING:
    from pigou.objectives import ProvisioningTimes

#: Standard errors above the planned load that trigger a replan. By trial: 1.6 attained 0.895 of the
#: requests, 1.3 attained 0.911 (docs/notes/planner-trials.md).
RISE_ERRORS = 1.3
#: Cap on the margin for late requests: twice what the model asks for.
MAX_MARGIN = 1.0
#: Half-life of the margin once the objective is kept, in seconds: one daily peak is remembered.
LATE_HALF_LIFE_S = 3600.0
#: Decay of late requests in the margin: a queue's tail falls e-fold with a quarter more capacity.
LATE_DECAY = 4.0
#: Share of missing requests that a step of the margin must bring in, or the rest is out of reach.
PROVEN = 0.2
#: Backlog that adds to the load, in TTFT objectives. An exponential wait of which 5% exceed one
#: exceeds three with probability 0.05^3.
BACKLOG_OBJECTIVES = 3.0
#: Lowest lag of a control loop, for fleets that start at once: six windows of 5 s.
MIN_LAG_S = 30.0
#: Windows until ordered workers that do not show count as never started.
CREDIT_WINDOWS = 3
#: Share of a scarce pool's value that assumes admission. By trial on 4 workers at 12 requests a
#: second: 0.5 keeps 0.71 inside, 1 keeps 0.48.
ADMITTED = 0.5
#: Mixed counts, and counts per role, tried with one another; bounds a plan's time.
SPLITS = 8
#: Seconds a migrating stream waits.
STREAM_MOVE_S = 0.1
#: Requests from which on routes say what prefill pools are for, and factors of these tokens that
#: trigger a replan.
MIN_ROUTED, ROUTES_RISE, ROUTES_FALL = 50.0, 1.25, 1.5
#: Least share of the prompt tokens that prefill pools are planned for.
MIN_REMOTE = 0.05
#: KV usage of a full worker, and the highest pool mean beside it.
HOT, COOL = 0.9, 0.5
#: Further slots of each rank that are tried for copies of hot experts.
MAX_COPIES = 8
#: Relative error of rounding in a capacity.
ROUNDING = 1e-12
#: Relative tolerance of the shadow price.
PRICE_WIDTH = 1e-3


class PricePlannerParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `PricePlanner`. Values and prices are weighted seconds of delay a second."""

    gpu_price: float = 1.0
    # seconds of delay charged for a request outside its objective, above 0; more while fewer
    # attain than shall (`late_price`)
    late_s: float = 60.0
    horizon_s: float = 600.0  # expected life of a move, over which its price is spread
    up: float = 0.05  # planned share of load beyond the estimate; the plan holds within it
    down: float = 0.15  # share by which load must fall below the plan before it shrinks
    # time for which it must have fallen, half for half of the surplus; None for three start-ups, at
    # least 60 s: load that comes back costs a start and late requests
    hold_s: float | None = None
    mix: float = 0.1  # relative change of lengths or speeds that triggers a replan
    recovery_s: float = 60.0  # to work off a backlog, at least two start-ups
    predictor: str = ""  # name in `pigou.predictor` that widens the plan; "" for none
    trend: bool = True  # whether growth is extrapolated to the time a start is ready
    flips: bool = True  # whether roles may change
    operating_points: bool = False  # whether `max_seqs` follows the ITL objective

    def __post_init__(self) -> None:
        check_fields(self, "gpu_price", "late_s", "horizon_s", "recovery_s", gt=0)
        check_fields(self, "up", "down", "mix", gt=0, lt=1)
        if self.hold_s is not None:
            check_bounds("hold_s", self.hold_s, ge=0)

    def hold_seconds(self, start_up_s: float) -> float:
        """Return how long load must have fallen, and a grown pool keeps its size."""
        return max(3.0 * start_up_s, 60.0) if self.hold_s is None else self.hold_s

    def can_flip(self, times: ProvisioningTimes) -> bool:
        """True if flips are allowed and quicker than starts."""
        return self.flips and times.flip_s < times.start_up_s


def goodput(prefill_rps: float, decode_rps: float, mixed_rps: float) -> float:
    """Requests a second inside the objective: min(R_P, R_D) + R_B, which couples the two games."""
    return min(prefill_rps, decode_rps) + mixed_rps


def scarce_goodput(load_rps: float, served_rps: float, inside: float, goal: float) -> float:
    """Effective requests a second where lambda > g, nobody refused: half lambda a / p, half g.

    Share a is inside at that load, p the goal; g, with admission, ranks plans while all are late.
    """
    late = load_rps * min(inside / max(goal, 1e-9), 1.0)
    return (1.0 - ADMITTED) * late + ADMITTED * served_rps


def saved(late_s: float, weight: float, rps: float) -> float:
    """Delay saved against serving nothing: w p_L g."""
    return weight * late_s * rps


def rent(price: float, gpus: int) -> float:
    """Delay that the GPUs, or their money, would save elsewhere: p G."""
    return price * gpus


def idle(params: PricePlannerParams, gpus: int, seconds: float) -> float:
    """One-time price of GPUs that serve nobody during a start, drain or flip."""
    return params.gpu_price * gpus * seconds


def lost(weight: float, cached_s: float, streams: int) -> float:
    """One-time delay of removing a worker: w (C h s + 0.1 n), lost cache and moving streams."""
    return weight * (cached_s + STREAM_MOVE_S * streams)
