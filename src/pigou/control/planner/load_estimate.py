"""Load of a model, estimated over windows: rate, trend and request lengths."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace

import numpy as np

from pigou.control.planner.predictors.arrivals import ArrivalParams, ArrivalRate
from pigou.performance.speed import RequestMix
from pigou.windows.planner_window import LoadWindow

#: Bins of a trend, and the fewest.
_TREND_BINS, _MIN_TREND_BINS = 36, 8
#: Standard errors by which a slope, or two windows' change of lengths, must show.
_ERRORS = 3.0
#: Highest growth extrapolated over a start-up.
_MAX_GROWTH = 2.0
#: Windows, or arrivals, before the first plan.
_FIRST_BINS, _FIRST_ARRIVALS = 6, 100
#: Output tokens assumed before a request ends.
_FIRST_OSL = 256.0
#: Time constant of request lengths, in seconds.
_MIX_S = 120.0
#: Weight of the Poisson prior on the dispersion, in arrivals, and its cap.
_POISSON_ARRIVALS, _MAX_DISPERSION = 30.0, 1000.0
#: Two standard errors of the dispersion of windows' counts: sqrt(2 / 144 windows), twice.
_NOISE = 0.25


class LoadEstimate:
    """Estimates rate, lengths and, over `lag_s` to a ready start, the trend of requests."""

    def __init__(self, seconds: float, lag_s: float) -> None:
        self.seconds, self._lag_s = seconds, lag_s
        self.rate = ArrivalRate(ArrivalParams(bin_s=seconds, false_alarm_s=max(14_400, seconds)))
        self.arrived = self.ended = 0.0  # requests that the mean lengths are taken over
        self._counts: deque[float] = deque(maxlen=_TREND_BINS)
        self._mix: RequestMix | None = None
        self._sides: tuple[int, ...] = (0, 0)

    @property
    def rps(self) -> float:
        """Estimated requests a second."""
        return self.rate.rate.mean

    @property
    def mix(self) -> RequestMix | None:
        """The current mix (None before the first).

        `arrival_scv` is the larger of two dispersions: of counts within windows, shrunk to Poisson
        where they are few, and of counts of windows.
        """
        if self._mix is None:
            return None
        known = self.arrived / (self.arrived + _POISSON_ARRIVALS)
        short = 1.0 + known * (self._mix.arrival_scv - 1.0)
        return replace(self._mix, arrival_scv=max(short, self.rate.dispersion - _NOISE))

    @property
    def is_known(self) -> bool:
        """True if arrivals and lengths were seen."""
        return self._mix is not None and self.rate.ready

    @property
    def is_enough(self) -> bool:
        """True if enough was seen for a first plan."""
        seen = len(self._counts) >= _FIRST_BINS or sum(self._counts) >= _FIRST_ARRIVALS
        return self.is_known and seen

    def observe(
        self, arrivals: float | None, seconds: float, load: LoadWindow | None
    ) -> float | None:
        """Take in a window; return its arrivals scaled to the usual length. None is a hole."""
        if load is not None and arrivals:
            self._learn_mix(load)
        self.rate.observe_bin(arrivals, seconds)
        if arrivals is None:
            return None
        arrivals *= self.seconds / seconds
        self._counts.append(float(arrivals))
        return arrivals

    def _learn_mix(self, load: LoadWindow) -> None:
        isl, osl = _length(load.isl), _length(load.osl)
        if isl is None:
            return
        ended = 0.0 if osl is None else float(load.completed or 1)
        if osl is None:  # none ended yet
            osl = _FIRST_OSL if self._mix is None else self._mix.osl
        hits = load.hit_rate
        if hits is None or not 0.0 <= hits <= 1.0:
            hits = 0.0 if self._mix is None else self._mix.hit_rate
        new = RequestMix(
            isl, max(osl, 1.0), min(hits, 0.99),
            _bounded(load.isl_scv, 0.0, 10.0), _bounded(load.arrival_scv, 1.0, _MAX_DISPERSION),
        )  # fmt: skip
        self._mix = self._mean_mix(self._mix or new, new, float(load.arrivals or 0), ended)

    def _mean_mix(self, old: RequestMix, new: RequestMix, count: float, ended: float) -> RequestMix:
        """Return the mean mix; restarts when two windows in a row are 3 standard errors off."""
        keep = math.exp(-self.seconds / _MIX_S)
        changes = (new.isl / old.isl - 1.0, new.osl / old.osl - 1.0)
        scv = max(old.isl_scv, 0.25)
        errors = (math.sqrt(scv / max(count, 1.0)), math.sqrt(0.25 / max(ended, 1.0)))
        sides = tuple(
            (x > _ERRORS * error) - (x < -_ERRORS * error)
            for x, error in zip(changes, errors, strict=True)
        )
        if any(side and side == last for side, last in zip(sides, self._sides, strict=True)):
            keep = 0.0
        self._sides = sides
        self.arrived = keep * self.arrived + count
        self.ended = keep * self.ended + ended
        step = count / self.arrived if self.arrived else 1.0
        osl_step = ended / self.ended if self.ended else 0.0

        return RequestMix(
            isl=old.isl + step * (new.isl - old.isl),
            osl=old.osl + osl_step * (new.osl - old.osl),
            hit_rate=old.hit_rate + step * (new.hit_rate - old.hit_rate),
            isl_scv=old.isl_scv + step * (new.isl_scv - old.isl_scv),
            arrival_scv=old.arrival_scv + step * (new.arrival_scv - old.arrival_scv),
        )

    def trend(self) -> float:
        """Return the rate at the lag's end if it grows linearly; else 0.

        A line counts where it fits the counts' square roots (Anscombe 1948) better than the best
        step, with a slope 3 standard errors above 0.
        """
        bins = len(self._counts)
        if bins < _MIN_TREND_BINS:
            return 0.0
        roots = np.sqrt(np.array(self._counts) + 0.375)
        at = np.arange(bins) - 0.5 * (bins - 1)
        slope = float(at @ roots / (at @ at))
        residuals = roots - roots.mean() - slope * at
        line = float(residuals @ residuals)
        error = math.sqrt(max(line / (bins - 2), 0.05) / float(at @ at))
        if slope < _ERRORS * error:
            return 0.0
        sums, squares = np.cumsum(roots), float(roots @ roots)
        older = np.arange(1, bins)
        explained = sums[:-1] ** 2 / older + (sums[-1] - sums[:-1]) ** 2 / (bins - older)
        if line > squares - float(explained.max()):
            return 0.0
        now = float(roots.mean() + slope * at[-1])
        lag_bins = self._lag_s / self.seconds
        rate = now * now / self.seconds
        ahead = rate + 2.0 * now * slope * lag_bins / self.seconds
        return min(ahead, _MAX_GROWTH * rate)


def _length(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) and value > 0 else None


def _bounded(value: float | None, default: float, top: float) -> float:
    if value is None or not math.isfinite(value):
        return default
    return min(max(value, 0.0), top)
