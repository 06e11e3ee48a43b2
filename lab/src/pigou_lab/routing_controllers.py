"""Controllers of the router: which temperature and overlap weight requests are routed under."""

from __future__ import annotations

import math
from itertools import product
from typing import ClassVar, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from pigou.config import ConfigError
from pigou.control.routing_controller import E2ESample, Parameters, RoutingSetting
from pigou.control.saturation.regime import Detector, Regime, TTFTSample
from pigou.request import SECOND

#: An epoch's mean latency counts for at most as many times the mean of all.
_WORST = 3.0


class RegimeTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Routing parameters of each regime; the defaults are Table 2 of Georgiou 2026."""

    # while the fleet does not queue.
    below: RoutingSetting = RoutingSetting(temperature=0.0, overlap_weight=1.0)
    # once it begins to.
    transition: RoutingSetting = RoutingSetting(temperature=0.7, overlap_weight=1.0)
    # when it has more than it can do.
    saturated: RoutingSetting = RoutingSetting(temperature=0.8, overlap_weight=0.1)

    def setting(self, regime: Regime) -> RoutingSetting:
        """Return the row of a regime."""
        return (self.below, self.transition, self.saturated)[regime.level]


class RegimeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `RegimeController`."""

    table: RegimeTable = RegimeTable()  # a row a regime


class InterpolatedConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `Interpolated`."""

    table: RegimeTable = RegimeTable()


class RegimeController:
    """The paper's controller: applies the row of the detector's regime (Table 2)."""

    Params: ClassVar[type[msgspec.Struct]] = RegimeConfig

    def __init__(self, config: RegimeConfig, detector: Detector, generator: object = None) -> None:
        self.config = config
        self.detector = detector

    def observe(self, now: int, outcome: TTFTSample | E2ESample) -> None:
        """Nothing is learned beside the detector."""

    def parameters(self, now: int) -> Parameters:
        """Return the row of the regime."""
        regime = self.detector.regime
        return Parameters.of(self.config.table.setting(regime), regime.level)


class Interpolated:
    """The same table, interpolated in the log of the smoothed signal (section 9)."""

    Params: ClassVar[type[msgspec.Struct]] = InterpolatedConfig

    def __init__(
        self, config: InterpolatedConfig, detector: Detector, generator: object = None
    ) -> None:
        self.config = config
        self.detector = detector

    def observe(self, now: int, outcome: TTFTSample | E2ESample) -> None:
        """Nothing is learned beside the detector."""

    def parameters(self, now: int) -> Parameters:
        """Return the interpolated row; the Below row before there is a signal."""
        at = self.share()
        table = self.config.table
        rows = (table.below, table.transition, table.saturated)
        return Parameters(
            float(np.interp(at, (0.0, 0.5, 1.0), [row.temperature for row in rows])),
            float(np.interp(at, (0.0, 0.5, 1.0), [row.overlap_weight for row in rows])),
        )

    def share(self) -> float:
        """Return how far the signal is from the first threshold to the second, 0 to 1."""
        low, high = self.detector.thresholds
        signal = self.detector.signal
        if not signal > low:
            return 0.0
        return min(1.0, math.log(signal / low) / math.log(high / low))


class BanditConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `Bandit`."""

    temperatures: tuple[float, ...] = (0.0, 0.7)
    overlap_weights: tuple[float, ...] = (0.1, 1.0, 4.0, 16.0)
    epoch: int = 2 * SECOND  # nanoseconds that all requests are routed under one setting
    discount: float = 0.99  # weight of an epoch's rewards one epoch later
    # width of the confidence bound, in mean latencies; 2 B sqrt(xi) of the source.
    exploration: float = 0.1
    # figure to minimise: `latency` to the last token, or `ttft`.
    reward: Literal["latency", "ttft"] = "latency"

    def __post_init__(self) -> None:
        for name in ("temperatures", "overlap_weights"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ConfigError(f"{name} is {values}; give at least one value, each once")
        for temperature, weight in product(self.temperatures, self.overlap_weights):
            RoutingSetting(temperature=temperature, overlap_weight=weight)
        if self.epoch < 1:
            raise ConfigError(f"epoch is {self.epoch} ns; it must be at least 1")
        if not 0 < self.discount < 1:
            raise ConfigError(f"discount is {self.discount}; it must be between 0 and 1")
        if not 0 <= self.exploration < math.inf:
            raise ConfigError(f"exploration is {self.exploration}; it must be at least 0")


class DiscountedUCB:
    """Discounted UCB: follows the best arm as it changes (Garivier and Moulines, ALT 2011).

    Picks the arm of greatest X_i + width sqrt(log n / N_i), width = 2 B sqrt(xi); N_i is the sum of
    discounted pulls, n = sum_i N_i, X_i the discounted mean reward. Unpulled arms come first.
    """

    def __init__(
        self, arms: int, discount: float, width: float, generator: np.random.Generator
    ) -> None:
        self.pulls = np.zeros(arms)
        self._rewards = np.zeros(arms)
        self._discount = discount
        self._width = width
        self._generator = generator

    @property
    def means(self) -> NDArray[np.float64]:
        """Discounted mean reward of each arm."""
        known = self.pulls > 0
        means: NDArray[np.float64] = np.full(len(self.pulls), np.nan)
        means[known] = self._rewards[known] / self.pulls[known]
        return means

    def forget(self) -> None:
        """End a round: discount past observations."""
        self.pulls *= self._discount
        self._rewards *= self._discount

    def reward(self, arm: int, value: float, pulls: float = 1.0) -> None:
        """Record `pulls` pulls of an arm at a mean reward."""
        self.pulls[arm] += pulls
        self._rewards[arm] += pulls * value

    def choose(self) -> int:
        """Return the arm to pull next."""
        total = max(float(self.pulls.sum()), 1.0)
        bounds = np.full(len(self.pulls), np.inf)
        known = self.pulls > 1e-9
        bonus = self._width * np.sqrt(math.log(total) / self.pulls[known])
        bounds[known] = self._rewards[known] / self.pulls[known] + bonus
        best = np.flatnonzero(bounds == bounds.max())
        return int(best[self._generator.integers(len(best))])


class Bandit:
    """Tries settings of a grid, one per epoch; reward is minus the relative mean latency."""

    Params: ClassVar[type[msgspec.Struct]] = BanditConfig

    def __init__(
        self, config: BanditConfig, detector: Detector | None, generator: np.random.Generator
    ) -> None:
        self.config = config
        self.settings = tuple(
            RoutingSetting(temperature=temperature, overlap_weight=weight)
            for temperature, weight in product(config.temperatures, config.overlap_weights)
        )
        arms = len(self.settings)
        self.arms = DiscountedUCB(arms, config.discount, config.exploration, generator)
        self._latency = np.zeros(arms)  # sums, each over what the request would take unloaded
        self._count = np.zeros(arms)
        self._total = np.zeros(2)  # latency, count; discounted
        self._arm = self.arms.choose()
        self._until: int | None = None

    def observe(self, now: int, outcome: TTFTSample | E2ESample) -> None:
        """Take in an outcome; raises ValueError for an unknown setting or `unloaded` <= 0."""
        self._turn(now)
        if isinstance(outcome, E2ESample) != (self.config.reward == "latency"):
            return
        if not 0 <= outcome.setting < len(self.settings):
            raise ValueError(
                f"setting is {outcome.setting}: give the one of the request's Parameters, "
                f"0 to {len(self.settings) - 1}"
            )
        if isinstance(outcome, E2ESample):
            if not outcome.unloaded > 0:
                raise ValueError(f"unloaded is {outcome.unloaded}: give seconds above 0")
            latency = outcome.seconds / outcome.unloaded
        else:
            latency = outcome.ttft
        self._latency[outcome.setting] += latency
        self._count[outcome.setting] += 1

    def parameters(self, now: int) -> Parameters:
        """Return the setting of the epoch."""
        self._turn(now)
        return Parameters.of(self.settings[self._arm], self._arm)

    def _turn(self, now: int) -> None:
        if self._until is None:
            self._until = now + self.config.epoch
        if now < self._until:
            return
        self._until = now + self.config.epoch
        if not self._count.any():
            return
        self.arms.forget()
        count = float(self._count.sum())
        self._total = self.config.discount * self._total + (self._latency.sum(), count)
        mean = max(float(self._total[0] / self._total[1]), 1e-12)
        for arm in np.flatnonzero(self._count):
            relative = float(self._latency[arm] / self._count[arm]) / mean
            self.arms.reward(int(arm), -min(relative, _WORST), float(self._count[arm]) / count)
        self._latency[:] = 0.0
        self._count[:] = 0.0
        self._arm = self.arms.choose()
