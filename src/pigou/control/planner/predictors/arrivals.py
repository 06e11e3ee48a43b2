"""The rate of arrivals within seconds: a mean over the time since it last changed."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import ClassVar

from pigou.config import ConfigError
from pigou.control.planner.predictors.calibrated import CalibratedPredictor
from pigou.control.planner.predictors.predictor import (
    Forecast,
    PredictorParams,
    check_counts,
    check_positive,
)

#: Bins after which the dispersion has half forgotten one, and how far one counts at most.
_DISPERSION_HALF_LIFE = 100.0
_MAX_TERM = 9.0


class ArrivalParams(PredictorParams, frozen=True, kw_only=True):
    """Parameters of `ArrivalRate`.

    Attributes:
        bin_s: seconds of one bin, which is the interval of `observe`; best from 1 to 5.
        bins: last bins that a change is looked for in.
        half_life_s: seconds after which a bin counts half in the mean.
        false_alarm_s: seconds between false alarms on Poisson arrivals of any constant rate; their
            mean is at least this.
    """

    bin_s: float = 5.0
    bins: int = 36
    half_life_s: float = 30.0
    false_alarm_s: float = 3600.0

    def __post_init__(self) -> None:
        """Refuse a test that would always, or never, find a change."""
        super().__post_init__()
        check_positive(self, "bin_s", "half_life_s", "false_alarm_s")
        check_counts(self, 2, "bins")
        if self.false_alarm_s < self.bin_s:
            raise ConfigError(
                f"false_alarm_s is {self.false_alarm_s}; it must be at least bin_s ({self.bin_s})"
            )


class ArrivalRate(CalibratedPredictor):
    """Weighted mean of the counts since the last change, which a likelihood ratio finds.

    A window of bins is split after each of its bins: n0 arrivals in the b older ones, n1 in the a
    newer ones, N = n0 + n1. The generalised likelihood ratio of two Poisson rates against one is

        G = n1 log(n1 / a) + n0 log(n0 / b) - N log(N / (a + b)) = N KL(n1 / N, a / (a + b))

    (Lorden 1971; window-limited: Lai 1995). At a constant rate n1 given N is binomial, so
    P(G >= h) <= 2 exp(-h) for every rate (Chernoff). There are `bins` - 1 splits at most, so

        h = log(2 (bins - 1) false_alarm_s / bin_s)

    raises a false alarm in a bin with a probability of at most bin_s / false_alarm_s. G is divided
    by the dispersion of the counts where that is above 1 (arrivals that cluster). At an alarm, bins
    before the likeliest split are dropped. A step by a factor r after a long history is found
    after about h / (log r - 1 + 1 / r) arrivals of the new rate.

    Attributes:
        alarms: changes so far.
    """

    Params: ClassVar[type[PredictorParams]] = ArrivalParams

    params: ArrivalParams

    def __init__(self, params: ArrivalParams | None = None) -> None:
        super().__init__(params)
        own = self.params
        self._threshold = math.log(2.0 * (own.bins - 1) * own.false_alarm_s / own.bin_s)
        self._counts: list[float] = []
        self._mean_count = 0.0
        self._effective_bins = 0.0
        self._keep = 0.5 ** (own.bin_s / own.half_life_s)
        self._dispersion = Dispersion()
        self.alarms = 0

    @property
    def threshold(self) -> float:
        """The ratio h at which the rate has changed, in nats."""
        return self._threshold

    @property
    def dispersion(self) -> float:
        """Variance of the counts over their mean, at least 1."""
        return max(self._dispersion.value, 1.0)

    @property
    def rate(self) -> Forecast:
        """The rate now in requests per second, and an interval of it with `coverage`.

        Its bounds come from the square roots of counts, whose variance is a quarter of the
        dispersion (Anscombe 1948).
        """
        if not self._counts:
            return Forecast(0.0, 0.0, 0.0)
        spread, bins = self.dispersion, self._effective_bins
        total, seconds = self._mean_count * bins, bins * self.params.bin_s
        width = NormalDist().inv_cdf(0.5 + self.params.coverage / 2.0) * math.sqrt(spread) / 2.0
        low = max(math.sqrt(total) - width, 0.0) ** 2
        high = (math.sqrt(total + spread) + width) ** 2
        return Forecast(self._mean_count / self.params.bin_s, low / seconds, high / seconds)

    def _update(self, load: float) -> None:
        self._dispersion.observe(load)
        self._counts.append(load)
        if len(self._counts) > self.params.bins:
            del self._counts[0]
        start = self._change()
        if start:
            del self._counts[:start]
            self.alarms += 1
        self._average()

    def _average(self) -> None:
        """Set the mean, and the number of equal bins whose mean would scatter as much."""
        weight = squares = total = 0.0
        for count in self._counts:
            weight = weight * self._keep + 1.0
            squares = squares * self._keep**2 + 1.0
            total += (count - total) / weight
        self._mean_count = total
        self._effective_bins = weight**2 / squares

    def _change(self) -> int:
        """Return the bin that a new rate began with, 0 where it did not change."""
        counts, bins = self._counts, len(self._counts)
        total = math.fsum(counts)
        limit, best = self._threshold * self.dispersion, 0
        older = 0.0
        for split in range(1, bins):
            older += counts[split - 1]
            ratio = likelihood_ratio(max(total - older, 0.0), bins - split, older, split)
            if ratio >= limit:
                limit, best = ratio, split
        return best

    def _mean(self, steps: int) -> float:  # noqa: ARG002 (the same at every horizon)
        return self._mean_count


class Dispersion:
    """Variance of counts over their mean, from differences of neighbours.

    d = (n(t) - n(t - 1))^2 / (n(t) + n(t - 1)) has mean 1 for Poisson counts of one rate, and a
    slow drift hardly moves it (von Neumann 1941). One d counts for at most nine times the mean
    of earlier ones, so a step is no dispersion.

    Attributes:
        value: exponentially weighted mean of d.
    """

    def __init__(self) -> None:
        self.value = 1.0
        self._last: float | None = None
        self._share = 1.0 - 0.5 ** (1.0 / _DISPERSION_HALF_LIFE)

    def observe(self, count: float) -> None:
        """Take in the count of a bin."""
        last, self._last = self._last, count
        if last is None or not count + last > 0.0:
            return
        term = (count - last) ** 2 / (count + last)
        self.value += self._share * (min(term, _MAX_TERM * max(self.value, 1.0)) - self.value)


def likelihood_ratio(newer: float, new_bins: int, older: float, old_bins: int) -> float:
    """Return G, the log likelihood ratio of two Poisson rates against one, in nats.

    Args:
        newer: arrivals in `new_bins` bins.
        new_bins: at least 1.
        older: arrivals in the `old_bins` bins before.
        old_bins: at least 1.
    """
    total, bins = newer + older, new_bins + old_bins
    ratio = 0.0
    if newer > 0.0:
        ratio += newer * math.log(newer * bins / (total * new_bins))
    if older > 0.0:
        ratio += older * math.log(older * bins / (total * old_bins))
    return max(ratio, 0.0)
