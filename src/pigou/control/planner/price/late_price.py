"""The shadow price of the objective: what a late request costs, by dual ascent."""

from __future__ import annotations

import math

from pigou.control.planner.price.terms import (
    LATE_DECAY,
    LATE_HALF_LIFE_S,
    MAX_MARGIN,
    MIN_LAG_S,
    PROVEN,
)

#: Ended requests from which on their share says something of a percentile.
_MIN_ENDED = 50.0


class LatePrice:
    """Price of a late request: rises while fewer attain than shall, falls once they do.

    | symbol | meaning |
    |---|---|
    | a, q | share of ended requests inside the objective, over a lag; share that shall be |
    | S | start-up, at least 30 s |
    | m | margin: share of capacity bought beyond what the model asks for |
    | p | price of a late request in seconds of delay, late_s e^(kappa m) |

    d(log p)/dt = pi / 4 / S log((1 - a) / (1 - q)). Late requests fall exponentially with spare
    capacity (the tail of a queue), so m = log(p / late_s) / kappa, and the gain is half of what is
    stable with a lag of S.
    - m rises by what should bring a to q, then waits for the workers that it bought. If fewer than
      `PROVEN` of the missing requests came in, the objective is out of reach: m goes back, for an
      hour.
    - While late requests are half of what they may be, m halves in an hour, and in twice the time
      after each fall that was too far: moves at constant load end.
    - Requests that came while, by the model, ready workers were too few say nothing.
    """

    def __init__(self, late_s: float, start_up_s: float) -> None:
        self.margin = 0.0
        self.is_out_of_reach = False
        self._late_s, self._lag_s = late_s, max(start_up_s, MIN_LAG_S)
        self._inside = self._ended = 0.0
        self._base = 0.0  # margin that is known to help, and what was missing with it
        self._base_missing, self._base_gpus = 0.0, 0
        self._goal = 0.0  # margin after which the effect is awaited
        self._shown_s = 0.0  # seconds since ready workers changed
        self._ready_gpus = 0
        self._half_life_s = LATE_HALF_LIFE_S  # seconds in which m halves
        self._top = 0.0  # height of m before it fell
        self._tried_s = math.inf  # since the objective was found out of reach

    @property
    def price(self) -> float:
        """Seconds of delay that a late request is charged."""
        return self._late_s * math.exp(LATE_DECAY * self.margin)

    @property
    def late_share(self) -> float | None:
        """Share of late requests over a lag; None where few ended, or their delay is explained."""
        return 1.0 - self._inside / self._ended if self._ended >= _MIN_ENDED else None

    @property
    def reason(self) -> str:
        """Why the price is what it is; "" while the objective is kept at the price of `late_s`."""
        if self.is_out_of_reach:
            return "more workers did not bring late requests in: the objective is out of reach"
        if self.margin < 0.005:
            return ""
        return (
            f"a late request costs {self.price:.0f} s: {self.margin:.0%} more capacity is planned"
        )

    def observe(
        self, inside: float, ended: float, seconds: float, share: float, ready_gpus: int,
        supply_gpus: int, is_explained: bool,
    ) -> None:  # fmt: skip
        """Take in ended requests of a window.

        `supply_gpus` counts workers on their way, too; `is_explained` says that the model knows why
        requests are late.
        """
        self._tried_s += seconds
        if is_explained or ready_gpus != self._ready_gpus:
            self._inside = self._ended = self._shown_s = 0.0
            self._ready_gpus = ready_gpus
        if is_explained:
            return
        keep = math.exp(-seconds / self._lag_s)
        self._inside = keep * self._inside + inside
        self._ended = keep * self._ended + ended
        self._shown_s += seconds
        late = self.late_share
        if late is None:
            return
        missing = share - (1.0 - late)
        if missing <= 0.0:
            if late < 0.5 * (1.0 - share):
                self._top = max(self._top, self.margin)
                self.margin *= 0.5 ** (seconds / self._half_life_s)
            self._base, self._base_missing = self.margin, 0.0
            self.is_out_of_reach = False
        elif inside < ended and (not self.is_out_of_reach or self._tried_s >= LATE_HALF_LIFE_S):
            excess = math.log(late / (1.0 - share)) / LATE_DECAY
            self._rise(missing, excess, seconds, supply_gpus)

    def _rise(self, missing: float, excess: float, seconds: float, supply_gpus: int) -> None:
        self.is_out_of_reach = False
        if self.margin < self._top:  # it fell too far
            self._half_life_s, self._top = 2.0 * self._half_life_s, 0.0
        if self._base_missing <= 0.0:
            self._begin_step(missing, excess, supply_gpus)
        bought = supply_gpus > self._base_gpus
        if not bought or self.margin < self._goal:
            rise = 0.25 * math.pi / self._lag_s * excess * seconds
            self.margin = min(self.margin + rise, MAX_MARGIN)
        elif self._ready_gpus >= supply_gpus and self._shown_s >= self._lag_s:
            if missing <= (1.0 - PROVEN) * self._base_missing:
                self._begin_step(missing, excess, supply_gpus)
            else:
                self.margin, self._base_missing = self._base, 0.0
                self.is_out_of_reach, self._tried_s = True, 0.0

    def _begin_step(self, missing: float, excess: float, supply_gpus: int) -> None:
        self._base, self._goal = self.margin, self.margin + excess
        self._base_missing, self._base_gpus = missing, supply_gpus
