"""Pigou's detector: do requests wait as long as they are served, by a cumulative sum."""

from __future__ import annotations

import math

import msgspec

from pigou.config import ConfigError
from pigou.control.saturation.change import OVERSHOOT, Cusum, cusum_threshold
from pigou.control.saturation.detector import Idle, Regime, Sample
from pigou.control.saturation.unloaded import UnloadedLaw
from pigou.request import SECOND

#: Observations whose mean is one observation of the long-run variance.
_BATCH = 8
#: The first guess of that variance counts as so many batches.
_PRIOR_BATCHES = 2.0
_BATCH_HALF_LIFE = 64.0
#: First tokens that the mean no-queue latency is a mean over; observations, their gap and signal.
_MEAN = 128.0
_GAP = 64.0
_SMOOTH = 4.0
#: Observations that a change takes at least.
_LEAST = 3
#: A residual that says less than this share of the mean no-queue latency is cut to it.
_SMALLEST = 0.25
#: Seconds that a first token takes at least; a clock may not tell less.
_SHORTEST = 1e-6


class CusumConfig(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True,
    tag_field="detector", tag="cusum",
):  # fmt: skip
    """Parameters of `CusumDetector`; none depends on model or hardware.

    Attributes:
        knee: times the mean no-queue latency at which Transition begins; 2 is where a request
            waits as long as it is served.
        full: times the mean no-queue latency at which Saturated begins.
        zone: factor on either side of a threshold that a change must reach to be worth finding
            (and must keep under for `arl0` to hold).
        arl0: mean nanoseconds between false alarms of a fleet at the inner edge of the zone.
        span: mean no-queue latencies that one observation is gathered over; queues come and go
            by themselves within a few of them.
        least_scale: least long-run standard deviation of an observation that is believed.
        half_life: requests after which the no-queue law has half forgotten one.
        idle: nanoseconds without work after which the regime is Below.
    """

    knee: float = 2.0
    full: float = 8.0
    zone: float = 1.5
    arl0: int = 4 * 3600 * SECOND
    span: float = 4.0
    least_scale: float = 0.6
    half_life: float = 256.0
    idle: int = 30 * SECOND

    def __post_init__(self) -> None:
        """Refuse values that separate no regimes."""
        if not 1.0 < self.zone < math.inf:
            raise ConfigError(f"zone is {self.zone}; it must be a factor above 1")
        if not self.knee > 1.0:
            raise ConfigError(f"knee is {self.knee}; it must be above 1, the no-queue latency")
        if not self.knee < self.full < math.inf:
            raise ConfigError(f"full is {self.full}; it must be above knee ({self.knee})")
        for name in ("span", "least_scale", "half_life"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be above 0")
        for name in ("arl0", "idle"):
            if getattr(self, name) < SECOND:
                raise ConfigError(
                    f"{name} is {getattr(self, name)} ns; it must be at least a second ({SECOND})"
                )


class CusumDetector:
    """Sequential detection of waiting, calibrated by the fleet itself.

    A first token says x = log(1 + (ttft - e(tokens)) / m): e is the no-queue law (`UnloadedLaw`),
    m its mean over the prompts that come, so e^x is 2 where a request waits as long as the mean
    one is served. The mean of x over `span` m is an observation; `Cusum` switches at log(knee)
    and log(full) follow it. Heights come from `arl0` and the observed rate; observations are
    standardised by their long-run deviation while Below, from batch means. Since the thresholds
    are multiples of what this fleet takes without a queue, nothing is calibrated by hand, and
    prompts of any mix of lengths can be compared.
    """

    def __init__(self, config: CusumConfig | None = None) -> None:
        self.config = config or CusumConfig()
        shift = 2.0 * math.log(self.config.zone)
        self._knee = Cusum(math.log(self.config.knee), shift, _LEAST)
        self._full = Cusum(math.log(self.config.full), shift, _LEAST)
        self._law = UnloadedLaw(self.config.half_life)
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
        """e^x of late: mean no-queue latencies that a request takes to its first token."""
        return math.exp(self._signal)

    @property
    def thresholds(self) -> tuple[float, float]:
        """`knee` and `full`."""
        return self.config.knee, self.config.full

    @property
    def law(self) -> UnloadedLaw:
        """The no-queue law."""
        return self._law

    def update(self, now: int, sample: Sample) -> Regime:
        """Take in a first token at `now` (ns); return the regime.

        Raises:
            ValueError: its TTFT is below 0 or not finite, or it has fewer than 0 tokens.
        """
        if not (0 <= sample.ttft < math.inf) or sample.tokens < 0:
            raise ValueError(
                f"ttft is {sample.ttft} s with {sample.tokens} tokens: give a finite time, and "
                "both at least 0"
            )
        ttft = max(sample.ttft, _SHORTEST)
        self._idle.busy(now)
        self._close(now)
        alone = None if sample.ahead is None else sample.ahead == 0
        self._law.observe(sample.tokens, ttft, alone, not self._knee.on)
        expected = self._law(sample.tokens)
        self._samples += 1
        self._mean += (expected - self._mean) / min(self._samples, _MEAN)
        waited = (ttft - expected) / max(self._mean, 1e-9)
        self._sum += math.log(max(1.0 + waited, _SMALLEST))
        self._gathered += 1
        return self.regime

    def tick(self, now: int, waiting: int) -> Regime:
        """Let time pass; a fleet that has been idle for `idle` is Below."""
        self._close(now)
        if self._idle.over(now, waiting):
            self._knee.turn(False)
            self._full.turn(False)
            self._signal = math.nan
        return self.regime

    def _close(self, now: int) -> None:
        """Make an observation of what was gathered, once it has been gathered for long enough."""
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
        # A height under the overshoot would be a test of single observations.
        arl = max(self.config.arl0 / max(self._gap, 1.0), 10.0)
        height = max(cusum_threshold(arl, shift), OVERSHOOT * shift)
        knee, full = self._knee.on, self._full.on
        self._knee.update(x, scale, height)
        self._full.update(x, scale, height)
        # Whoever is over the higher threshold is over the lower one.
        if self._full.on and not full and not self._knee.on:
            self._knee.turn(True)
        elif knee and not self._knee.on and self._full.on:
            self._full.turn(False)


class LongRunVariance:
    """Variance of a batch's mean times its size, values being cut at `most` and at -1."""

    def __init__(self, most: float, first: float = 0.5) -> None:
        self._most = most
        self._sum = 0.0
        self._count = 0
        self._mean = 0.0
        self._weight = _PRIOR_BATCHES
        self._keep = 0.5 ** (1.0 / _BATCH_HALF_LIFE)
        self.value = first

    def observe(self, x: float) -> None:
        """Take in a value."""
        self._sum += min(max(x, -1.0), self._most)
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
