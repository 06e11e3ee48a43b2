"""The three series of a workload, each with a predictor: arrivals, and lengths in tokens."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from pigou.control.planner.predictors.predictor import Forecast, LoadPredictor, as_load


class WorkloadForecast(msgspec.Struct, frozen=True):
    """A workload to come.

    Attributes:
        arrivals: requests of one interval.
        isl: mean prompt tokens of these.
        osl: mean output tokens of these.
    """

    arrivals: Forecast
    isl: Forecast
    osl: Forecast


class WorkloadForecaster:
    """Forecasts arrivals, prompt tokens and output tokens, each by itself.

    In an interval without requests mean lengths do not exist: they are holes.

    Args:
        make: a new predictor.
        carry: whether lengths of such an interval are the last ones observed, as Dynamo 1.6.1
            has it (plugins/builtins/local_planner.py).
    """

    def __init__(self, make: Callable[[], LoadPredictor], carry: bool = False) -> None:
        self.arrivals = make()
        self.isl = make()
        self.osl = make()
        self._carry = carry
        self._lengths: tuple[float | None, float | None] = (None, None)

    @property
    def ready(self) -> bool:
        """Whether a request was observed, and how long it was."""
        return all(predictor.ready for predictor in (self.arrivals, self.isl, self.osl))

    def observe(self, arrivals: float | None, isl: float | None, osl: float | None) -> None:
        """Take in one interval; None is a hole in the metrics."""
        arrivals = as_load(arrivals)
        lengths = as_load(isl), as_load(osl)
        if arrivals == 0:
            lengths = self._lengths if self._carry else (None, None)
        elif arrivals is not None:
            one, other = self._lengths
            self._lengths = (
                one if lengths[0] is None else lengths[0],
                other if lengths[1] is None else lengths[1],
            )
        self.arrivals.observe(arrivals)
        self.isl.observe(lengths[0])
        self.osl.observe(lengths[1])

    def forecast(self, steps: int = 1) -> WorkloadForecast:
        """Return the workload `steps` intervals ahead.

        Raises:
            ValueError: `steps` is below 1.
        """
        return WorkloadForecast(
            self.arrivals.forecast(steps),
            self.isl.forecast(steps),
            self.osl.forecast(steps),
        )
