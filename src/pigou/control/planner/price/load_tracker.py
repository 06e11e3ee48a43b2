"""The load that a plan is made for: it holds until the load leaves a band around it."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace

import numpy as np

from pigou.control.planner.predictors.arrivals import ArrivalParams, ArrivalRate
from pigou.control.planner.predictors.predictor import LoadPredictor
from pigou.control.planner.predictors.predictor import load as load_predictor
from pigou.control.planner.price.params import PricePlannerParams
from pigou.objectives import ProvisioningTimes
from pigou.performance.speed import RequestMix
from pigou.windows.planner_window import LoadWindow

#: Bins that a trend is looked for in, and the fewest.
_TREND_BINS, _MIN_TREND_BINS = 36, 8
#: Standard errors by which a trend, and a rise above the plan, must show.
_TREND_ERRORS, _RISE_ERRORS = 3.0, 1.3
#: Most that load is expected to grow until a start is ready.
_MAX_GROWTH = 2.0
#: Windows, or requests, that are seen before the first plan.
_FIRST_BINS, _FIRST_ARRIVALS = 3, 100
#: Output tokens of a request before one has ended.
_FIRST_OSL = 256.0
#: Seconds after which the lengths of a request count for 1 / e.
_MIX_S = 120.0
#: Standard errors by which the lengths of a window differ from the mean when they have changed.
_MIX_ERRORS = 3.0
#: Arrivals that the gaps of a Poisson process count for.
_POISSON_ARRIVALS = 30.0
#: Half-life of a headroom that was too large, in seconds, and its most.
_HEADROOM_S, _MAX_HEADROOM = 3600.0, 0.5


@dataclass(frozen=True, slots=True)
class PlannedLoad:
    """The load of one model that the plan is made for.

    Attributes:
        low_rps, high_rps: interval of the estimate.
    """

    rps: float  # requests a second that are planned for
    mix: RequestMix
    observed_rps: float  # estimate of now
    low_rps: float
    high_rps: float


class LoadTracker:
    """Estimates the load of one model, and holds the plan's load within a band.

    | symbol | meaning |
    |---|---|
    | r | mean rate since it last changed (`ArrivalRate`), grown by the trend to the lag's end |
    | u | r (1 + up): what a plan made now would be for |
    | planned | what the plan is for |

    planned := u when r > planned by more than 1.3 standard errors of r; planned := the largest u of
    the last `hold_s` when all of these are below planned (1 - down), and no trend was seen for the
    lag and `hold_s`. After half of `hold_s` half of the difference goes. In between it stays, and
    so does the plan: at constant load it changes finitely often, and a plan that was made larger
    becomes smaller at the earliest after half of `hold_s`.
    The first plan is for what the fleet serves as it is, where that lies within the interval of
    the estimate (`begin`).

    Args:
        times: the lag is its start-up time.
    """

    def __init__(
        self, params: PricePlannerParams, times: ProvisioningTimes, seconds: float
    ) -> None:
        self._params = params
        self._lag_s = times.start_up_s
        self._hold_bins = max(math.ceil(params.hold_seconds(times.start_up_s) / seconds), 1)
        self._lag_bins = math.ceil(times.start_up_s / seconds)
        self._trend_bins = 0
        self._planned_bins = 0  # since the plan's load changed
        self._seconds = seconds
        self._rate = ArrivalRate(ArrivalParams(bin_s=seconds, false_alarm_s=max(14_400, seconds)))
        self._predictor: LoadPredictor | None = None
        if params.predictor:
            self._predictor = load_predictor(params.predictor)
        self._counts: deque[float] = deque(maxlen=_TREND_BINS)
        self._uppers: deque[float] = deque(maxlen=self._hold_bins)
        self._mix: RequestMix | None = None
        self._planned_mix: RequestMix | None = None
        self._planned = 0.0
        self._mix_off_bins = 0
        self._sides: tuple[int, ...] = (0, 0)
        self._arrived = self._ended = 0.0
        self.headroom = 0.0

    @property
    def mix(self) -> RequestMix | None:
        """What requests are like now; None while none was seen.

        Gaps of few arrivals scatter at random: they count as Poisson's until more were seen.
        """
        if self._mix is None:
            return None
        known = self._arrived / (self._arrived + _POISSON_ARRIVALS)
        return replace(self._mix, arrival_scv=1.0 + known * (self._mix.arrival_scv - 1.0))

    @property
    def observed_rps(self) -> float:
        """Requests a second, as estimated."""
        return self._rate.rate.mean

    @property
    def is_known(self) -> bool:
        """Whether arrivals, and the lengths of a request, were seen."""
        return self._mix is not None and self._rate.ready

    @property
    def planned(self) -> PlannedLoad:
        """The load that the plan is for."""
        mix = self._planned_mix or self.mix or RequestMix(1.0, 1.0)
        rate = self._rate.rate
        return PlannedLoad(self._planned, mix, rate.mean, rate.low, rate.high)

    def observe(
        self, arrivals: float | None, seconds: float, load: LoadWindow | None, backlog_rps: float
    ) -> bool:
        """Take in one window; return whether the plan's load changed.

        Args:
            arrivals: requests of the window; None for a hole, which changes nothing.
            load: their lengths; None for a hole.
            backlog_rps: requests a second that a backlog adds.
        """
        if load is not None and arrivals:
            self._learn_mix(load)
        self._rate.observe_bin(arrivals, seconds)
        if arrivals is not None:
            arrivals *= self._seconds / seconds
        if self._predictor is not None:
            self._predictor.observe(arrivals)
        if arrivals is None:
            self._uppers.clear()  # nothing is known to have fallen
            return False
        self._counts.append(float(arrivals))
        if not self.is_known or not self._has_evidence():
            return False
        return self._replan(backlog_rps)

    def _has_evidence(self) -> bool:
        """Whether enough was seen for a first plan."""
        return len(self._counts) >= _FIRST_BINS or sum(self._counts) >= _FIRST_ARRIVALS

    def begin(self, capacity_rps: float) -> None:
        """Let the first plan be for what the fleet serves as it is, where that may be the load.

        Args:
            capacity_rps: that it serves inside the objective; below the interval of the estimate
                it changes nothing, above it the upper bound counts.
        """
        rate = self._rate.rate
        if capacity_rps >= rate.low:
            self._planned = min(capacity_rps, rate.high * (1.0 + self._params.up))

    def learn_attainment(self, missing: float, gain: float) -> None:
        """Widen the plan while requests are late that it should have kept inside.

        Args:
            missing: share of requests below the objective's; 0 or less where it is kept.
            gain: part of it that is made up for, bounded by the lag.
        """
        if missing > 0:
            self.headroom = min(self.headroom + gain * missing, _MAX_HEADROOM)
        else:
            self.headroom *= 0.5 ** (self._seconds / _HEADROOM_S)

    def _learn_mix(self, load: LoadWindow) -> None:
        isl, osl = _length(load.isl), _length(load.osl)
        if isl is None:
            return
        if osl is None:  # none ended yet
            osl = _FIRST_OSL if self._mix is None else self._mix.osl
        hits = _share(load.hit_rate)
        new = RequestMix(
            isl, max(osl, 1.0), min(hits or 0.0, 0.99),
            _bounded(load.isl_scv, 0.0, 10.0), _bounded(load.arrival_scv, 1.0, 10.0),
        )  # fmt: skip
        if self._mix is not None and hits is None:
            new = replace(new, hit_rate=self._mix.hit_rate)
        ended = 0.0 if _length(load.osl) is None else float(load.completed or 1)
        self._mix = self._mean_of_mix(self._mix or new, new, float(load.arrivals or 0), ended)

    def _mean_of_mix(
        self, old: RequestMix, new: RequestMix, count: float, ended: float
    ) -> RequestMix:
        """Return the moving mean of mixes over requests; it begins anew where lengths changed.

        They have when the lengths of two windows in a row lie 3 standard errors of their mean from
        it, on the same side. Without a known variance that of an exponential distribution is taken.

        Args:
            old: mean so far.
            count: requests that came in it, of which the prompts are.
            ended: those that ended in it, of which the outputs are.
        """
        keep = math.exp(-self._seconds / _MIX_S)
        changes = (new.isl / old.isl - 1.0, new.osl / old.osl - 1.0)
        scv = max(old.isl_scv, 0.25)
        errors = (math.sqrt(scv / max(count, 1.0)), math.sqrt(0.25 / max(ended, 1.0)))
        sides = tuple(
            (x > _MIX_ERRORS * error) - (x < -_MIX_ERRORS * error)
            for x, error in zip(changes, errors, strict=True)
        )
        is_new = any(side and side == last for side, last in zip(sides, self._sides, strict=True))
        self._sides = sides
        if is_new:
            keep = 0.0
        self._arrived = keep * self._arrived + count
        self._ended = keep * self._ended + ended
        step = count / self._arrived if self._arrived else 1.0
        mean = RequestMix(
            *(old_value + step * (new_value - old_value)
              for old_value, new_value in zip(_figures(old), _figures(new), strict=True))
        )  # fmt: skip
        of_ended = ended / self._ended if self._ended else 0.0
        return replace(mean, osl=old.osl + of_ended * (new.osl - old.osl))

    def _replan(self, backlog_rps: float) -> bool:
        rate, error = self._rate.rate, self._rate.standard_error
        trend = self._trend()
        self._trend_bins = self._lag_bins + self._hold_bins if trend > 0 else self._trend_bins - 1
        foreseen = trend
        if self._predictor is not None and self._predictor.ready:
            steps = max(self._lag_bins, 1)
            foreseen = max(foreseen, self._predictor.forecast(steps).mean / self._seconds)
        needed = max(rate.mean, foreseen) + backlog_rps
        factor = (1.0 + self._params.up) * (1.0 + self.headroom)
        self._uppers.append(needed * factor)
        if needed * (1.0 + self.headroom) > self._planned + _RISE_ERRORS * error:
            return self._set(needed * factor)
        full = len(self._uppers) == self._hold_bins and self._trend_bins <= 0
        if full and max(self._uppers) < self._planned * (1.0 - self._params.down):
            return self._set(max(self._uppers))
        self._planned_bins += 1
        half = self._hold_bins // 2
        if (
            half
            and min(len(self._uppers), self._planned_bins) >= half
            and self._trend_bins <= self._hold_bins - half
        ):
            top = max(list(self._uppers)[-half:])
            if top < self._planned * (1.0 - self._params.down):
                return self._set(0.5 * (top + self._planned))
        if self._mix_moved():
            return self._set(self._planned)
        return False

    def _set(self, rps: float) -> bool:
        self._planned = rps
        self._planned_bins = 0
        self._planned_mix = self.mix
        self._mix_off_bins = 0
        return True

    def _mix_moved(self) -> bool:
        """Whether requests became longer than planned, or shorter for as long as `hold_s`."""
        old, new = self._planned_mix, self.mix
        if old is None or new is None:
            return True
        ratios = (new.computed / max(old.computed, 1e-9), new.osl / old.osl, new.isl / old.isl)
        error = math.sqrt(max(new.isl_scv, 0.25) / max(min(self._arrived, self._ended), 1.0))
        if max(ratios) > 1.0 + self._params.mix + _RISE_ERRORS * error:
            return True
        scatters = ((old.isl_scv, new.isl_scv), (old.arrival_scv, new.arrival_scv))
        is_off = min(ratios) < 1.0 - self._params.mix
        is_off |= any(abs(one - other) > 0.5 * max(one, 1.0) for one, other in scatters)
        self._mix_off_bins = self._mix_off_bins + 1 if is_off else 0
        return self._mix_off_bins >= self._hold_bins

    def _trend(self) -> float:
        """Return the rate at the lag's end if it grows along a line; else 0.

        Square roots of counts (Anscombe 1948) are fitted by a line and by a step at the best bin.
        The line counts only where it fits better than the step, and its slope is 3 standard errors
        above 0: a step is no trend, and is not extrapolated.
        """
        bins = len(self._counts)
        if not self._params.trend or bins < _MIN_TREND_BINS:
            return 0.0
        roots = np.sqrt(np.array(self._counts) + 0.375)
        at = np.arange(bins) - 0.5 * (bins - 1)
        slope = float(at @ roots / (at @ at))
        residuals = roots - roots.mean() - slope * at
        line = float(residuals @ residuals)
        error = math.sqrt(max(line / (bins - 2), 0.05) / float(at @ at))
        if slope < _TREND_ERRORS * error:
            return 0.0
        sums, squares = np.cumsum(roots), float(roots @ roots)
        older = np.arange(1, bins)
        explained = sums[:-1] ** 2 / older + (sums[-1] - sums[:-1]) ** 2 / (bins - older)
        if line > squares - float(explained.max()):
            return 0.0
        now = float(roots.mean() + slope * at[-1])
        lag_bins = self._lag_s / self._seconds
        rate = now * now / self._seconds
        ahead = rate + 2.0 * now * slope * lag_bins / self._seconds
        return min(ahead, _MAX_GROWTH * rate)


def _figures(mix: RequestMix) -> tuple[float, ...]:
    return mix.isl, mix.osl, mix.hit_rate, mix.isl_scv, mix.arrival_scv


def _length(value: float | None) -> float | None:
    if value is None or not (math.isfinite(value) and value > 0):
        return None
    return value


def _share(value: float | None) -> float | None:
    if value is None or not 0.0 <= value <= 1.0:
        return None
    return value


def _bounded(value: float | None, default: float, top: float) -> float:
    if value is None or not math.isfinite(value):
        return default
    return min(max(value, 0.0), top)
