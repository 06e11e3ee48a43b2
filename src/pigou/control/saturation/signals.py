"""The two signals of saturation that the paper considered and did not deploy."""

from __future__ import annotations

import math
from collections import deque

from pigou.config import ConfigError
from pigou.control.saturation.detector import Sample
from pigou.control.saturation.polled import Polled, PolledConfig


class SecondDifferenceConfig(
    PolledConfig, frozen=True, kw_only=True, tag_field="detector", tag="second-difference"
):
    """Parameters of `SecondDifference`. The thresholds depend on the fleet: there is no default.

    Attributes:
        theta1: seconds per squared request in flight at which Transition begins.
        theta2: the same for Saturated.
        apart: least difference of load, in requests, between polls that are compared.
    """

    apart: float = 1.0

    def __post_init__(self) -> None:
        """Refuse values that separate no regimes."""
        super().__post_init__()
        if not 0 < self.apart < math.inf:
            raise ConfigError(f"apart is {self.apart}; it must be above 0 requests")


class ConfigVarianceConfig(
    PolledConfig, frozen=True, kw_only=True, tag_field="detector", tag="config-variance"
):
    """Parameters of `ConfigVariance`. The thresholds depend on the fleet: there is no default.

    Attributes:
        theta1: squared seconds at which Transition begins.
        theta2: the same for Saturated.
        window: polls that a setting's mean is taken over.
    """

    window: int = 6

    def __post_init__(self) -> None:
        """Refuse values that separate no regimes."""
        super().__post_init__()
        if self.window < 1:
            raise ConfigError(f"window is {self.window} polls; it must be at least 1")


class SecondDifference(Polled):
    """Second divided difference of mean TTFT over load (Georgiou 2026, Proposition 4).

    Of the last three polls whose loads (mean requests in flight) lie apart, at x0 < x1 < x2 with
    mean TTFTs y:  2 [(y2 - y1) / (x2 - x1) - (y1 - y0) / (x1 - x0)] / (x2 - x0).  The paper's
    authors gave it up: at 5 s a poll it is mostly noise. A poll whose load lies near that of one
    of the last two takes its place.
    """

    def __init__(self, config: SecondDifferenceConfig) -> None:
        super().__init__(config)
        self.config = config
        self._points: deque[tuple[float, float]] = deque(maxlen=3)

    def _of(self, window: list[Sample]) -> float | None:
        load = sum(each.load for each in window) / len(window)
        ttft = sum(each.ttft for each in window) / len(window)
        far = [point for point in self._points if abs(point[0] - load) >= self.config.apart]
        self._points = deque([*far, (load, ttft)], maxlen=3)
        if len(self._points) < 3:
            return None
        (x0, y0), (x1, y1), (x2, y2) = sorted(self._points)
        return 2.0 * ((y2 - y1) / (x2 - x1) - (y1 - y0) / (x1 - x0)) / (x2 - x0)

    def _forget(self) -> None:
        self._points.clear()


class ConfigVariance(Polled):
    """Variance of the mean TTFT across settings of the router (Georgiou 2026, section 8.4).

    It needs a fleet that tries several settings at once (`Sample.setting`): each one's mean is
    taken over the last `window` polls, and the signal is the variance of these means. With one
    setting there is no signal, and the regime stays Below.
    """

    def __init__(self, config: ConfigVarianceConfig) -> None:
        super().__init__(config)
        self.config = config
        self._windows: deque[list[Sample]] = deque(maxlen=config.window)

    def _of(self, window: list[Sample]) -> float | None:
        self._windows.append(window)
        by_setting: dict[int, list[float]] = {}
        for each in (sample for past in self._windows for sample in past):
            by_setting.setdefault(each.setting, []).append(each.ttft)
        means = [sum(found) / len(found) for found in by_setting.values()]
        if len(means) < 2:
            return None
        centre = sum(means) / len(means)
        return sum((mean - centre) ** 2 for mean in means) / (len(means) - 1)

    def _forget(self) -> None:
        self._windows.clear()
