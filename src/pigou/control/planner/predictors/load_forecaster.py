"""The three series of a workload, each with a predictor: requests, and lengths in tokens."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from pigou.control.planner.predictors.predictor import Forecast, LoadPredictor, as_load


class LoadForecast(msgspec.Struct, frozen=True):
    """A workload to come.

    Attributes:
        requests: of one interval.
        prompt_tokens: mean of a request (ISL).
        output_tokens: mean of a request (OSL).
    """

    requests: Forecast
    prompt_tokens: Forecast
    output_tokens: Forecast


class LoadForecaster:
    """Forecasts requests, prompt tokens and output tokens, each by itself.

    In an interval without requests mean lengths do not exist: they are holes.

    Args:
        make: a new predictor.
        carry: whether lengths of such an interval are the last ones observed, as Dynamo 1.6.1
            has it (plugins/builtins/local_planner.py).
    """

    def __init__(self, make: Callable[[], LoadPredictor], carry: bool = False) -> None:
        self.requests = make()
        self.prompt_tokens = make()
        self.output_tokens = make()
        self._carry = carry
        self._lengths: tuple[float | None, float | None] = (None, None)

    @property
    def ready(self) -> bool:
        """Whether a request was observed, and how long it was."""
        return all(
            predictor.ready for predictor in (self.requests, self.prompt_tokens, self.output_tokens)
        )

    def observe(
        self, requests: float | None, prompt_tokens: float | None, output_tokens: float | None
    ) -> None:
        """Take in one interval; None is a hole in the metrics."""
        requests = as_load(requests)
        lengths = as_load(prompt_tokens), as_load(output_tokens)
        if requests == 0:
            lengths = self._lengths if self._carry else (None, None)
        elif requests is not None:
            one, other = self._lengths
            self._lengths = (
                one if lengths[0] is None else lengths[0],
                other if lengths[1] is None else lengths[1],
            )
        self.requests.observe(requests)
        self.prompt_tokens.observe(lengths[0])
        self.output_tokens.observe(lengths[1])

    def forecast(self, steps: int = 1) -> LoadForecast:
        """Return the workload `steps` intervals ahead.

        Raises:
            ValueError: `steps` is below 1.
        """
        return LoadForecast(
            self.requests.forecast(steps),
            self.prompt_tokens.forecast(steps),
            self.output_tokens.forecast(steps),
        )
