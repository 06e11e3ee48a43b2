"""The price of a worker, as a sum of terms in weighted seconds of delay a second.

    net = saved - rent - moved / horizon_s

| symbol | meaning | from |
|---|---|---|
| lambda | planned requests a second | `load_band` |
| R_P, R_D, R_B | requests a second that prefill, decode and mixed pools serve inside the objective | `pigou.performance.capacity` |
| g | goodput | `goodput` |
| w | mean weight of the requests | their classes |
| G | GPUs | the split |
| p | price of a GPU: `gpu_price`, or the shadow price of the budget where that is higher | `frontier` |
| u, d, f | seconds of a start-up, a drain and a flip | `ProvisioningTimes` |
| C, h, s | cached tokens of a worker, share of prompt tokens that hits, seconds of a token | windows, the model |
| n | streams of a worker | windows |

Pools get the GPUs where the sum is largest (`frontier`), and one price clears the budget.
"""  # noqa: E501

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from pigou.objectives import ProvisioningTimes

#: Rise of the rate above the planned load that counts, in standard errors. Chosen by trial: 1.6
#: attained 0.895 of the requests, 1.3 attained 0.911 (docs/notes/planner-trials.md).
RISE_ERRORS = 1.3
#: Highest share by which load is planned larger for requests that were late: beyond, the model is
#: wrong, and more workers are no remedy.
MAX_HEADROOM = 0.5
#: Half-life of that share once the objective is kept, in seconds: one daily peak is remembered.
HEADROOM_S = 3600.0
#: Backlog of a pool that adds to the load, in objectives of TTFT. An exponential wait of which 5%
#: exceed one objective exceeds three with a probability of 0.05^3.
BACKLOG_OBJECTIVES = 3.0
#: Lowest lag of a control loop, in seconds, for fleets that start at once: six windows of 5 s.
MIN_LAG_S = 30.0
#: Windows until workers that were ordered and do not show count as never started.
CREDIT_WINDOWS = 3
#: Share of the value of a scarce pool that assumes admission. By trial: on 4 workers at 12 requests
#: a second, half lets 0.71 of them be inside, all of it 0.48.
ADMITTED = 0.5
#: Numbers of mixed workers, and counts of each role, that are tried with one another. It bounds the
#: time of a plan.
SPLITS = 8
#: Seconds that a stream waits while its worker goes; the order of a migration.
STREAM_MOVE_S = 0.1
#: KV use from which on a worker is full, and up to which its pool's mean is not.
HOT, COOL = 0.9, 0.5
#: Relative width at which the shadow price is known.
PRICE_WIDTH = 1e-3


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

    def __post_init__(self) -> None:
        for name in ("gpu_price", "late_s", "horizon_s", "recovery_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")
        for name in ("up", "down", "mix"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0, below 1")
        if self.hold_s is not None and not 0 <= self.hold_s < math.inf:
            raise ValueError(f"hold_s is {self.hold_s}; it must be at least 0")

    def hold_seconds(self, start_up_s: float) -> float:
        """Return for how long load must have fallen, and a pool does not shrink after it grew."""
        return max(3.0 * start_up_s, 60.0) if self.hold_s is None else self.hold_s

    def can_flip(self, times: ProvisioningTimes) -> bool:
        """Whether roles may change, and that is quicker than a start."""
        return self.flips and times.flip_s < times.start_up_s


def goodput(prefill_rps: float, decode_rps: float, mixed_rps: float) -> float:
    """Requests a second that are served inside the objective: min(R_P, R_D) + R_B.

    Decode workers get what prefill lets through, and the other way round: the minimum couples the
    two games.
    """
    return min(prefill_rps, decode_rps) + mixed_rps


def scarce_goodput(load_rps: float, served_rps: float, inside: float, goal: float) -> float:
    """Requests a second that count where lambda > g, and nobody is turned away.

    Half of what counts is lambda a / p: share a of the requests is inside at that load, and p is to
    be. The other half is g, which is what is inside with admission. It alone says what is best
    while all are late.
    """
    late = load_rps * min(inside / max(goal, 1e-9), 1.0)
    return (1.0 - ADMITTED) * late + ADMITTED * served_rps


def saved(params: PricePlannerParams, weight: float, rps: float) -> float:
    """Delay that is saved against serving nothing: w late_s g.

    A request outside its objective counts for `late_s` seconds of delay.
    """
    return weight * params.late_s * rps


def rent(price: float, gpus: int) -> float:
    """Delay that the GPUs would save elsewhere, or that their money is worth: p G."""
    return price * gpus


def idle(params: PricePlannerParams, gpus: int, seconds: float) -> float:
    """Price of GPUs that serve nobody while a worker starts, drains or flips, once."""
    return params.gpu_price * gpus * seconds


def lost(weight: float, cached_s: float, streams: int) -> float:
    """Delay that the removal of a worker costs once: w (C h s + 0.1 n).

    Its prefix cache is computed again (C h s seconds), and its streams wait while they move.
    """
    return weight * (cached_s + STREAM_MOVE_S * streams)
