"""Pigou's detector: a CUSUM of whether requests wait as long as they are served."""

from __future__ import annotations

import math
from typing import ClassVar

import msgspec

from pigou.config import check_bounds, check_fields
from pigou.control.saturation.regime import Idle, Regime, TTFTSample
from pigou.request import SECOND

#: Observations per batch mean of the long-run variance.
_BATCH = 8
#: Weight of that variance's prior, in batches.
_PRIOR_BATCHES = 2.0
_BATCH_HALF_LIFE = 64.0
#: Time constants, in first tokens, of the mean no-queue latency, and in observations of their gap
#: and signal.
_MEAN = 128.0
_GAP = 64.0
_SMOOTH = 4.0
#: Fewest observations of a change.
_MIN_OBSERVATIONS = 3
#: Residuals are clipped at this share of the mean no-queue latency.
_SMALLEST = 0.25
#: Shortest TTFT, against the clock's resolution.
_SHORTEST = 1e-6
#: Relative residuals count less beyond this many running medians (Huber).
_HUBER = 3.0
_MEDIAN_STEP = 0.05
_SMALLEST_SPREAD = 0.01
#: Weight of an observation above the line that may have waited: an expectile (Newey and Powell,
#: "Asymmetric Least Squares Estimation and Testing", 1987).
_TAIL = 0.05
#: Weight of a prompt with none ahead while the fleet seems to queue.
_DOUBTED = 0.25
#: Certainly unqueued observations that make the others needless.
_ENOUGH = 8.0
#: Mean overshoot of both ends of a discrete cumulative sum (Siegmund 1985): 2 x 0.583.
OVERSHOOT = 1.166


class UnloadedLaw:
    """No-queue law, online: relative least squares of seconds = base + slope * tokens.

    Prompts that may have waited count only as a lower envelope, so a queue is never learned as
    normal.
    """

    def __init__(self, half_life: float = 256.0) -> None:
        check_bounds("half_life", half_life, gt=0, unit=" requests")
        self._keep = 0.5 ** (1.0 / half_life)
        self._sums = [0.0] * 5  # sums of 1, t, t^2, y, t y; each over the expected y squared
        self._sure = 0.0
        self._spread = 0.25
        self.base = 0.0
        self.slope = 0.0

    def __call__(self, tokens: float) -> float:
        """Return seconds of a prompt with `tokens` uncached tokens; 0 if unknown."""
        return self.base + self.slope * tokens

    def observe(
        self, tokens: float, seconds: float, nobody_ahead: bool | None, steady: bool
    ) -> None:
        """Take in a first token; unless `steady`, prompts with none ahead count less."""
        sure = nobody_ahead is True and steady
        if nobody_ahead is False and self._sure >= _ENOUGH:
            return
        expected = self(tokens) or seconds
        residual = seconds / expected - 1.0
        trust = 1.0 if sure or residual < 0 else _DOUBTED if nobody_ahead else _TAIL
        trust *= min(1.0, _HUBER * self._spread / max(abs(residual), 1e-12))
        if nobody_ahead or residual < 0:
            step = _MEDIAN_STEP if abs(residual) > self._spread else -_MEDIAN_STEP
            self._spread = max(self._spread * math.exp(step), _SMALLEST_SPREAD)
        if sure:
            self._sure = self._sure * self._keep + 1.0
        weight = trust / (expected * expected)
        keep = self._keep**trust
        count, size, square, time, product = self._sums
        self._sums = [
            keep * count + weight,
            keep * size + weight * tokens,
            keep * square + weight * (tokens * tokens),
            keep * time + weight * seconds,
            keep * product + weight * (tokens * seconds),
        ]
        self._solve()

    def _solve(self) -> None:
        count, size, square, seconds, product = self._sums
        det = count * square - size * size
        if det > 1e-9 * count * square:
            slope = (count * product - size * seconds) / det
            base = (seconds - slope * size) / count
            if slope >= 0.0 and base >= 0.0:
                self.base, self.slope = base, slope
                return
        # The optimum is on the quadrant's edge that explains more.
        if square > 0.0 and product * product * count >= seconds * seconds * square:
            self.base, self.slope = 0.0, product / square
        else:
            self.base, self.slope = seconds / count, 0.0


class CusumConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `CusumDetector`; none depends on model or hardware."""

    # Transition begins at this many mean no-queue latencies; at 2 a request waits as long as it is
    # served
    knee: float = 2.0
    full: float = 8.0  # Saturated begins at this many mean no-queue latencies
    # factor on either side of a threshold that a change must reach to be detected (and must stay
    # under for `arl0` to hold)
    zone: float = 1.5
    # mean nanoseconds between false alarms at the inner edge of the zone
    arl0: int = 4 * 3600 * SECOND
    span: float = 4.0  # mean no-queue latencies per observation; queues come and go within a few
    least_scale: float = 0.6  # lower bound of an observation's long-run standard deviation
    half_life: float = 256.0  # requests after which the no-queue law halves a weight
    idle: int = 30 * SECOND  # nanoseconds without work after which the regime is Below

    def __post_init__(self) -> None:
        check_bounds("zone", self.zone, gt=1)
        check_bounds("knee", self.knee, gt=1, unit=", the no-queue latency")
        check_bounds("full", self.full, gt=self.knee, unit=", the knee")
        check_fields(self, "span", "least_scale", "half_life", gt=0)
        check_fields(self, "arl0", "idle", ge=SECOND, unit=" ns (a second)")


class CusumDetector:
    """Sequential detection of waiting, self-calibrated.

    A first token gives x = log(1 + (ttft - e(tokens)) / m), with e the no-queue law (`UnloadedLaw`)
    and m its mean: e^x is 2 where a request waits as long as the mean one is served. Means of x
    over `span` m, standardised by batch means while Below, drive a `Cusum` each at log(knee) and
    log(full).
    """

    Params: ClassVar[type[msgspec.Struct]] = CusumConfig

    def __init__(self, config: CusumConfig | None = None) -> None:
        self.config = config or CusumConfig()
        shift = 2.0 * math.log(self.config.zone)
        self._knee = Cusum(math.log(self.config.knee), shift, _MIN_OBSERVATIONS)
        self._full = Cusum(math.log(self.config.full), shift, _MIN_OBSERVATIONS)
        self.law = UnloadedLaw(self.config.half_life)
        self._idle = Idle(self.config.idle)
        self._variance = LongRunVariance(math.log(self.config.knee * self.config.zone))
        self._mean = 0.0
        self._samples = 0
        self._sum = 0.0
        self._gathered = 0
        self._began: int | None = None
        self._gap = 0.0
        self._observed = 0
        self._signal = math.nan

    @property
    def regime(self) -> Regime:
        """The regime as of the last call."""
        if self._full.on:
            return Regime.SATURATED
        return Regime.TRANSITION if self._knee.on else Regime.BELOW

    @property
    def signal(self) -> float:
        """Recent e^x: TTFT in mean no-queue latencies."""
        return math.exp(self._signal)

    @property
    def thresholds(self) -> tuple[float, float]:
        """`knee` and `full`."""
        return self.config.knee, self.config.full

    def update(self, now: int, sample: TTFTSample) -> Regime:
        """Take in a first token at `now` (ns); raises ValueError for a bad TTFT or token count."""
        if not (0 <= sample.ttft < math.inf) or sample.tokens < 0:  # quicker than the call
            check_fields(sample, "ttft", "tokens", ge=0)
        ttft = max(sample.ttft, _SHORTEST)
        self._idle.busy(now)
        self._close(now)
        nobody_ahead = None if sample.ahead is None else sample.ahead == 0
        self.law.observe(sample.tokens, ttft, nobody_ahead, not self._knee.on)
        expected = self.law(sample.tokens)
        self._samples += 1
        self._mean += (expected - self._mean) / min(self._samples, _MEAN)
        relative_wait = (ttft - expected) / max(self._mean, 1e-9)
        self._sum += math.log(max(1.0 + relative_wait, _SMALLEST))
        self._gathered += 1
        return self.regime

    def tick(self, now: int, waiting: int) -> Regime:
        """Advance time; a fleet idle for `idle` is Below."""
        self._close(now)
        if self._idle.over(now, waiting):
            self._knee.turn(False)
            self._full.turn(False)
            self._signal = math.nan
        return self.regime

    def _close(self, now: int) -> None:
        if self._began is None:
            self._began = now
        took = now - self._began
        if not self._gathered or took < self.config.span * self._mean * SECOND:
            return
        x = self._sum / self._gathered
        self._sum, self._gathered, self._began = 0.0, 0, now
        self._observed += 1
        self._gap += (took - self._gap) / min(self._observed, _GAP)
        first = math.isnan(self._signal)
        self._signal = x if first else self._signal + (x - self._signal) / _SMOOTH
        if not self._knee.on:
            self._variance.observe(x)
        self._switch(x)

    def _switch(self, x: float) -> None:
        scale = max(math.sqrt(self._variance.value), self.config.least_scale)
        shift = self._knee.shift / scale
        # A height below the overshoot would test single observations.
        arl = max(self.config.arl0 / max(self._gap, 1.0), 10.0)
        height = max(cusum_threshold(arl, shift), OVERSHOOT * shift)
        knee, full = self._knee.on, self._full.on
        self._knee.update(x, scale, height)
        self._full.update(x, scale, height)
        # A mean above the higher threshold is above the lower one.
        if self._full.on and not full and not self._knee.on:
            self._knee.turn(True)
        elif knee and not self._knee.on and self._full.on:
            self._full.turn(False)


class LongRunVariance:
    """Long-run variance from batch means, with values clipped to -1..`maximum`."""

    def __init__(self, maximum: float, first: float = 0.5) -> None:
        self._max = maximum
        self._sum = 0.0
        self._count = 0
        self._mean = 0.0
        self._weight = _PRIOR_BATCHES
        self._keep = 0.5 ** (1.0 / _BATCH_HALF_LIFE)
        self.value = first

    def observe(self, x: float) -> None:
        """Take in a value."""
        self._sum += min(max(x, -1.0), self._max)
        self._count += 1
        if self._count < _BATCH:
            return
        mean = self._sum / _BATCH
        self._sum, self._count = 0.0, 0
        self._weight = self._weight * self._keep + 1.0
        share = 1.0 / self._weight
        off = mean - self._mean
        self._mean += share * off
        self.value += share * (_BATCH * off * off * (1.0 - share) - self.value)


def cusum_threshold(arl: float, shift: float) -> float:
    """Return the height at which Page's CUSUM of log likelihood ratios (1954) raises an alarm.

    The mean moves by `shift` standard deviations, and the average run length to a false alarm is
        ARL0 = 2 (e^y - y - 1) / shift^2,  y = height + 1.166 shift
    (Siegmund, "Sequential Analysis", 1985, section 2.6), solved for the height. `arl` is ARL0 in
    observations. Raises ValueError for `arl` under 1 or `shift` not above 0.
    """
    check_bounds("arl", arl, ge=1, unit=" observations")
    check_bounds("shift", shift, gt=0)
    wanted = 0.5 * arl * shift * shift
    # Both start at or above the root of a convex function: Newton's steps only decrease.
    y = min(math.sqrt(2 * wanted), math.log(2 * wanted + 2))
    for _ in range(50):
        step = (math.expm1(y) - y - wanted) / math.expm1(y)
        y -= step
        if step < 1e-12 * y:
            break
    return max(y - OVERSHOOT * shift, 0.0)


class Cusum:
    """A switch on a series' mean: Page's CUSUM of `shift`/2 above against below a reference.

    While on, it tests the reverse. One observation adds at most 1/`min_observations` of the height.
    """

    def __init__(self, reference: float, shift: float, min_observations: int = 4) -> None:
        check_bounds("shift", shift, gt=0)
        check_bounds("min_observations", min_observations, ge=1)
        self.reference = reference
        self.shift = shift
        self.on = False
        self.sum = 0.0
        self._min_observations = min_observations

    def update(self, value: float, scale: float, height: float) -> bool:
        """Take in a value of long-run deviation `scale` (Bagshaw and Johnson 1975); return `on`."""
        gain = self.shift * (value - self.reference) / (scale * scale)
        limit = height / self._min_observations
        gain = min(max(-gain if self.on else gain, -limit), limit)
        self.sum = max(0.0, self.sum + gain)
        if self.sum >= height * (1 - 1e-12):
            self.turn(not self.on)
        return self.on

    def turn(self, on: bool) -> None:
        """Set the switch and reset the sum."""
        self.on = on
        self.sum = 0.0
