"""The planned load: it holds until the estimate leaves a band around it."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from pigou.control.planner.load_estimate import LoadEstimate
from pigou.control.planner.predictors.predictor import LoadPredictor
from pigou.control.planner.predictors.predictor import load as load_predictor
from pigou.control.planner.price.terms import (
    RISE_ERRORS,
    PricePlannerParams,
)
from pigou.objectives import ProvisioningTimes
from pigou.performance.speed import RequestMix
from pigou.windows.planner_window import LoadWindow


@dataclass(frozen=True, slots=True)
class PlannedLoad:
    """The load of one model that the plan is for."""

    rps: float  # planned requests a second
    mix: RequestMix
    observed_rps: float  # current estimate, and its interval
    low_rps: float
    high_rps: float


class LoadBand:
    """Holds the planned load while the estimate stays within a band around it.

    | symbol | meaning |
    |---|---|
    | r | estimated rate (or its trend after a start-up), plus backlog |
    | e | standard error of the estimate |
    | u | r (1 + up): load of a plan made now |
    | L | planned load, to which the margin m of the late price is added |

    L := u when r > L + 1.3 e. L := the largest u of the last `hold_s` when all are
    below L (1 - down), without a trend for a start-up and `hold_s`; after half of `hold_s` L loses
    half of the difference. So at constant load L changes finitely often. The first plan is for the
    fleet's capacity if inside the estimate's interval (`begin`).
    """

    def __init__(
        self, params: PricePlannerParams, times: ProvisioningTimes, seconds: float
    ) -> None:
        self.estimate = LoadEstimate(seconds, times.start_up_s)
        self.margin = 0.0  # share by which load is planned larger, for requests that were late
        self._planned_margin = 0.0
        self._params, self._seconds = params, seconds
        self._hold_bins = max(math.ceil(params.hold_seconds(times.start_up_s) / seconds), 1)
        self._lag_bins = math.ceil(times.start_up_s / seconds)
        self._predictor: LoadPredictor | None = None
        if params.predictor:
            self._predictor = load_predictor(params.predictor)
        self._planned = 0.0
        self._planned_mix: RequestMix | None = None
        self._uppers: deque[float] = deque(maxlen=self._hold_bins)
        self._trend_bins = 0  # windows until a trend counts as over
        self._planned_bins = 0  # windows since the planned load changed
        self._mix_off_bins = 0  # windows in which requests were shorter than planned

    @property
    def planned(self) -> PlannedLoad:
        """The planned load."""
        mix = self._planned_mix or self.estimate.mix or RequestMix(1.0, 1.0)
        rate = self.estimate.rate.rate
        rps = self._planned * (1.0 + self._planned_margin)
        return PlannedLoad(rps, mix, rate.mean, rate.low, rate.high)

    def observe(
        self, arrivals: float | None, seconds: float, load: LoadWindow | None, backlog_rps: float
    ) -> bool:
        """Take in a window (None: hole) and a backlog; return whether the planned load changed."""
        arrivals = self.estimate.observe(arrivals, seconds, load)
        if self._predictor is not None:
            self._predictor.observe(arrivals)
        if arrivals is None:
            self._uppers.clear()  # nothing is known to have fallen
            return False
        return self.estimate.is_enough and self._replan(backlog_rps)

    def begin(self, capacity_rps: float) -> None:
        """Plan first for the present capacity, if within the estimate's interval; capped above."""
        rate = self.estimate.rate.rate
        if capacity_rps >= rate.low:
            self._planned = min(capacity_rps, rate.high * (1.0 + self._params.up))

    def _replan(self, backlog_rps: float) -> bool:
        needed = self._foreseen_rps() + backlog_rps
        factor = 1.0 + self._params.up
        self._uppers.append(needed * factor)
        error = self.estimate.rate.standard_error
        if needed > self._planned + RISE_ERRORS * error:
            return self._set(needed * factor)
        floor = self._planned * (1.0 - self._params.down)
        full = len(self._uppers) == self._hold_bins and self._trend_bins <= 0
        if full and max(self._uppers) < floor:
            return self._set(max(self._uppers))
        self._planned_bins += 1
        half = self._hold_bins // 2
        if (
            half
            and min(len(self._uppers), self._planned_bins) >= half
            and self._trend_bins <= self._hold_bins - half
        ):
            top = max(list(self._uppers)[-half:])
            if top < floor:
                return self._set(0.5 * (top + self._planned))
        is_off = abs(self.margin - self._planned_margin) > self._params.up
        if not (is_off or self._mix_moved()):
            return False
        return self._set(self._planned)

    def _foreseen_rps(self) -> float:
        rps = self.estimate.rps
        trend = self.estimate.trend() if self._params.trend else 0.0
        self._trend_bins = self._lag_bins + self._hold_bins if trend > 0 else self._trend_bins - 1
        if self._predictor is not None and self._predictor.ready:
            steps = max(self._lag_bins, 1)
            trend = max(trend, self._predictor.forecast(steps).mean / self._seconds)
        return max(rps, trend)

    def _set(self, rps: float) -> bool:
        self._planned, self._planned_margin = rps, self.margin
        self._planned_bins = self._mix_off_bins = 0
        self._planned_mix = self.estimate.mix
        return True

    def _mix_moved(self) -> bool:
        """True if requests became longer than planned, or shorter for `hold_s`."""
        old, new = self._planned_mix, self.estimate.mix
        if old is None or new is None:
            return True
        ratios = (new.computed / max(old.computed, 1e-9), new.osl / old.osl, new.isl / old.isl)
        known = max(min(self.estimate.arrived, self.estimate.ended), 1.0)
        error = math.sqrt(max(new.isl_scv, 0.25) / known)
        if max(ratios) > 1.0 + self._params.mix + RISE_ERRORS * error:
            return True
        scatters = ((old.isl_scv, new.isl_scv), (old.arrival_scv, new.arrival_scv))
        is_off = min(ratios) < 1.0 - self._params.mix
        is_off |= any(abs(one - other) > 0.5 * max(one, 1.0) for one, other in scatters)
        self._mix_off_bins = self._mix_off_bins + 1 if is_off else 0
        return self._mix_off_bins >= self._hold_bins
