"""Rate of arrivals: the mean since it last changed."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import ClassVar

from pigou.config import ConfigError, check_bounds, check_fields
from pigou.control.planner.predictors.predictor import (
    MAX_COUNT,
    CalibratedPredictor,
    Forecast,
    PredictorParams,
)

#: Half-life of the dispersion in bins, and the cap on one term.
_DISPERSION_HALF_LIFE = 100.0
_MAX_TERM = 9.0
#: Shortest and longest bin in seconds.
_MIN_BIN_S, _MAX_BIN_S = 0.001, 86_400


class ArrivalParams(PredictorParams, frozen=True, kw_only=True):
    """Parameters of `ArrivalRate`."""

    bin_s: float = 5.0  # seconds per bin, the interval of `observe` and `forecast`; best 1 to 5
    bins: int = 36  # bins searched for a change
    half_life_s: float = 30.0  # half-life of a bin's weight in the mean
    # lower bound of the mean seconds between false alarms at constant Poisson rates
    false_alarm_s: float = 3600.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, "half_life_s", "false_alarm_s", gt=0)
        check_bounds("bins", self.bins, ge=2, le=MAX_COUNT)
        check_bounds("bin_s", self.bin_s, ge=_MIN_BIN_S, le=_MAX_BIN_S)
        if self.false_alarm_s < self.bin_s:
            raise ConfigError(
                f"false_alarm_s is {self.false_alarm_s}; it must be at least bin_s ({self.bin_s})"
            )


class ArrivalRate(CalibratedPredictor):
    """Weighted mean of counts since the last change, detected by a likelihood ratio.

    Each split of the window has n0 arrivals in the b older seconds, n1 in the a newer ones, N = n0
    + n1. The generalised likelihood ratio of two Poisson rates against one is
        G = n1 log(n1 / a) + n0 log(n0 / b) - N log(N / (a + b)) = N KL(n1 / N, a / (a + b))
    (Lorden 1971; window-limited: Lai 1995). At a constant rate P(G >= h) <= 2 exp(-h) (Chernoff),
    so
        h = log(2 (bins - 1) false_alarm_s / bin_s)
    bounds false alarms per bin by bin_s / false_alarm_s. G is divided by the dispersion if above 1.
    An alarm drops the bins before the likeliest split; a step by a factor r takes about h / (log r
    - 1 + 1 / r) arrivals of the new rate.
    """

    Params: ClassVar[type[PredictorParams]] = ArrivalParams

    params: ArrivalParams

    def __init__(self, params: ArrivalParams | None = None) -> None:
        super().__init__(params)
        own = self.params
        #: ratio h of a changed rate, in nats
        self.threshold = math.log(2.0 * (own.bins - 1) * own.false_alarm_s / own.bin_s)
        self._counts: list[float] = []
        self._seconds: list[float] = []
        self._next_s = own.bin_s
        self._rate = 0.0
        self._effective_s = 0.0
        self._dispersion = Dispersion()
        self.alarms = 0  # changes so far

    @property
    def dispersion(self) -> float:
        """Variance of the counts over their mean, at least 1."""
        return max(self._dispersion.value, 1.0)

    @property
    def rate(self) -> Forecast:
        """Current requests a second, and an interval with `coverage` (Anscombe 1948)."""
        if not self._counts:
            return Forecast(0.0, 0.0, 0.0)
        spread, seconds = self.dispersion, self._effective_s
        total = self._rate * seconds
        width = NormalDist().inv_cdf(0.5 + self.params.coverage / 2.0) * math.sqrt(spread) / 2.0
        low = max(math.sqrt(total) - width, 0.0) ** 2
        high = (math.sqrt(total + spread) + width) ** 2
        return Forecast(self._rate, low / seconds, high / seconds)

    @property
    def standard_error(self) -> float:
        """Standard error of the rate in requests a second; 0 before the first bin."""
        if not self._counts:
            return 0.0
        return math.sqrt(self.dispersion * self._rate / self._effective_s)

    def observe_bin(self, count: float | None, seconds: float) -> None:
        """Take in arrivals of a bin; None is a hole. Raises ValueError outside 1 ms to 1 day."""
        check_bounds("seconds", seconds, ge=_MIN_BIN_S, le=_MAX_BIN_S)
        self._next_s = seconds
        self.observe(None if count is None else count * (self.params.bin_s / seconds))
        self._next_s = self.params.bin_s

    def _update(self, load: float) -> None:
        seconds = self._next_s
        count = load * (seconds / self.params.bin_s)
        self._dispersion.observe(count, seconds)
        self._counts.append(count)
        self._seconds.append(seconds)
        start = max(len(self._counts) - self.params.bins, 0)
        self._drop(start)
        change = self._change()
        if change:
            self._drop(change)
            self.alarms += 1
        self._average()

    def _drop(self, bins: int) -> None:
        del self._counts[:bins]
        del self._seconds[:bins]

    def _average(self) -> None:
        """Set the rate, and the seconds of an equally noisy plain mean."""
        weight = squares = rate = 0.0
        for count, seconds in zip(self._counts, self._seconds, strict=True):
            keep = 0.5 ** (seconds / self.params.half_life_s)
            weight = weight * keep + seconds
            squares = squares * keep * keep + seconds
            rate += (count - rate * seconds) / weight
        self._rate = rate
        self._effective_s = weight * weight / squares

    def _change(self) -> int:
        """Return the first bin of a new rate; 0 without a change."""
        total, span = math.fsum(self._counts), math.fsum(self._seconds)
        limit, change = self.threshold * self.dispersion, 0
        older = seconds = 0.0
        for split in range(1, len(self._counts)):
            older += self._counts[split - 1]
            seconds += self._seconds[split - 1]
            ratio = likelihood_ratio(max(total - older, 0.0), span - seconds, older, seconds)
            if ratio >= limit:
                limit, change = ratio, split
        return change

    def _mean(self, steps: int) -> float:  # noqa: ARG002 (the same at every horizon)
        return self._rate * self.params.bin_s


class Dispersion:
    """Variance of counts over their mean, from successive differences (von Neumann 1941).

    d = (n s' - n' s)^2 / (s s' (n + n')), for n arrivals in s seconds after n' in s', has mean 1
    for constant Poisson rates. It is capped at nine times its mean: a step is no dispersion.
    """

    def __init__(self) -> None:
        self.value = 1.0  # exponentially weighted mean of d
        self._last: tuple[float, float] | None = None
        self._share = 1.0 - 0.5 ** (1.0 / _DISPERSION_HALF_LIFE)

    def observe(self, count: float, seconds: float = 1.0) -> None:
        """Take in a bin's count."""
        last, self._last = self._last, (count, seconds)
        if last is None or not count + last[0] > 0.0:
            return
        off = count * last[1] - last[0] * seconds
        term = off * off / (seconds * last[1] * (count + last[0]))
        self.value += self._share * (min(term, _MAX_TERM * max(self.value, 1.0)) - self.value)


def likelihood_ratio(newer: float, new_s: float, older: float, old_s: float) -> float:
    """Return G, the log likelihood ratio of two Poisson rates against one, in nats."""
    total, span = newer + older, new_s + old_s
    ratio = 0.0
    for count, seconds in ((newer, new_s), (older, old_s)):
        share = count / total if total > 0.0 else 0.0
        if share > 0.0:
            ratio += count * math.log(share * span / seconds)
    return max(ratio, 0.0)
