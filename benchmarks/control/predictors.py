"""Load predictors beside one another: error, bias and coverage of their intervals, on traces.

    python -m benchmarks.control.predictors --traces DIR [--only NAME]... [--slow] [--choose]

DIR has azure/, mooncake/ and servegen-deepseek-r1/. Azure's and Mooncake's hour is stretched to a
day; ServeGen's clients are drawn for two days of the same rates, and the second one is scored. On
the one-day traces an hour warms up. Each predictor sees requests, mean prompt tokens (isl) and mean
output tokens (osl) of every interval, and forecasts the next one (or the fourth: a start-up of
100 s is over within four intervals of 30 s).

MAE, RMSE and bias (forecast minus load) are in percent of the mean load; coverage is the share of
loads inside a 90% interval, in percent. Intervals without requests have no lengths: not scored.
`arrivals` sees bins of 5 s. Constants (`ewma`, `arrivals`) were chosen on the traces marked *
(`--choose` prints their grid). ARIMA runs at 180 s alone, and with `--slow`.

GPU-hours at equal attainment are those of a planner with each of them, on traces:
`python -m benchmarks.control.planner.planner_trials run --planners "price,predictor=ewma;..."`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.control.predictor_loads import DAY, Arrivals, Floats, all_arrivals
from pigou.config import ConfigError
from pigou.control.planner.predictors.arrivals import ArrivalParams, ArrivalRate
from pigou.control.planner.predictors.predictor import CalibratedPredictor, load

#: Seconds of an interval, and steps ahead.
SETTINGS = ((30, 1), (30, 4), (180, 1))
SIGNALS = ("requests", "isl", "osl")
NAMES = (
    "last-value", "ewma", "seasonal-naive", "kalman", "dynamo-kalman", "holt-winters", "arrivals",
)  # fmt: skip
SLOW = ("auto-arima", "dynamo-arima")
WARM_UP = 3600.0


@dataclass(frozen=True)
class Row:
    """One predictor on one signal of a trace; errors in percent of the mean load."""

    trace: str
    signal: str
    interval_s: int
    steps: int
    predictor: str
    mae: float
    rmse: float
    bias: float
    coverage: float
    microseconds: float


class BinnedArrivals(CalibratedPredictor):
    """`arrivals` fed by bins, that forecasts the requests of longer intervals."""

    def __init__(self, interval: float, params: ArrivalParams) -> None:
        super().__init__()
        self._interval = interval
        self.inner = ArrivalRate(params)

    def _update(self, load: float) -> None:
        pass

    def _mean(self, steps: int) -> float:  # noqa: ARG002 (the same at every horizon)
        return self.inner.rate.mean * self._interval


def rows(
    arrivals: Arrivals,
    interval: int,
    names: Sequence[str],
    params: dict[str, dict[str, Any]] | None = None,
    signals: Sequence[str] = SIGNALS,
) -> Iterator[Row]:
    """Yield the rows of a trace cut into intervals, for every setting of that length."""
    for signal in signals:
        for name in names:
            if name == "seasonal-naive" and arrivals.days < 2:
                continue
            if name == "arrivals" and signal != "requests":
                continue
            own = (params or {}).get(name, {})
            yield from score(arrivals, signal, interval, name, own)


def score(
    arrivals: Arrivals, signal: str, interval: int, name: str, params: dict[str, Any]
) -> Iterator[Row]:
    """Run one predictor over one signal."""
    if signal == "requests":
        loads = arrivals.counts(interval)
    else:
        loads = arrivals.means(getattr(arrivals, signal), interval)
    steps = [ahead for length, ahead in SETTINGS if length == interval]
    forecasts = np.full((len(steps), 3, len(loads)), np.nan)
    bins = np.zeros((len(loads), 0))
    if name == "arrivals":
        own = ArrivalParams(**params)
        bins = arrivals.counts(own.bin_s).reshape(len(loads), -1)
        predictor: Any = BinnedArrivals(interval, own)
    else:
        season = {"season": round(DAY / interval)} if name == "seasonal-naive" else {}
        predictor = load(name, {**season, **params})
    began = perf_counter()
    for at, value in enumerate(loads):
        for count in bins[at]:
            predictor.inner.observe(float(count))
        predictor.observe(None if np.isnan(value) else float(value))
        for index, ahead in enumerate(steps):
            if predictor.ready and at + ahead < len(loads):
                forecast = predictor.forecast(ahead)
                forecasts[index, :, at + ahead] = forecast.mean, forecast.low, forecast.high
    each = (perf_counter() - began) / len(loads) * 1e6
    first = round((DAY if arrivals.days > 1 else WARM_UP) / interval)
    for ahead, (means, lows, highs) in zip(steps, forecasts[:, :, first:], strict=True):
        yield row(
            Row(arrivals.name, signal, interval, ahead, name, 0, 0, 0, 0, each),
            loads[first:], means, lows, highs,
        )  # fmt: skip


def row(empty: Row, loads: Floats, means: Floats, lows: Floats, highs: Floats) -> Row:
    """Return a row with its errors filled in."""
    scored = ~np.isnan(loads) & ~np.isnan(means)
    loads, means = loads[scored], means[scored]
    errors = 100 * (means - loads) / loads.mean()
    inside = (lows[scored] <= loads) & (loads <= highs[scored])
    return replace(
        empty,
        mae=float(np.abs(errors).mean()),
        rmse=float(np.sqrt((errors**2).mean())),
        bias=float(errors.mean()),
        coverage=float(100 * inside.mean()),
    )


HEADER = "| trace | signal | interval, ahead | predictor | MAE | RMSE | bias | coverage | us |\n"


def line(one: Row) -> str:
    """Return a row of the table."""
    return (
        f"| {one.trace} | {one.signal} | {one.interval_s} s, {one.steps} | {one.predictor} "
        f"| {one.mae:.1f} | {one.rmse:.1f} | {one.bias:+.1f} | {one.coverage:.0f} "
        f"| {one.microseconds:.0f} |"
    )


def choose(folder: Path) -> None:
    """Print the geometric mean of errors on the traces that choose, for a grid of constants."""
    grid: list[tuple[str, dict[str, Any]]] = [
        *(("ewma", {"half_life": value}) for value in (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)),
        *(
            ("arrivals", {"bins": bins, "half_life_s": half_life, "false_alarm_s": alarm})
            for bins in (12, 36, 72)
            for half_life in (15.0, 30.0, 60.0, 120.0)
            for alarm in (900.0, 3600.0, 14_400.0)
        ),
        *(("ewma", {"errors": value}) for value in (32, 64, 128, 256)),
    ]
    traces = [arrivals for arrivals, chosen in all_arrivals(folder) if chosen]
    for name, params in grid:
        parts = [
            one
            for arrivals in traces
            for interval in (30, 180)
            for one in rows(arrivals, interval, (name,), {name: params}, SIGNALS[:1])
        ]
        cells = ", ".join(
            f"{one.trace} {one.interval_s} s, {one.steps}: {one.rmse:.1f} ({one.coverage:.0f})"
            for one in parts
        )
        mean = np.exp(np.mean(np.log([one.rmse for one in parts])))
        print(f"{name} {params}: RMSE {mean:.2f}; {cells}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--only", action="append", help="predictor")
    parser.add_argument("--slow", action="store_true", help="ARIMA too")
    parser.add_argument("--choose", action="store_true", help="print the grid of constants")
    options = parser.parse_args()
    if options.choose:
        choose(options.traces)
        return
    print(HEADER + "|---" * 9 + "|")
    for arrivals, chosen in all_arrivals(options.traces):
        marked = replace(arrivals, name=arrivals.name + " *" * chosen)
        for interval in dict.fromkeys(interval for interval, _ in SETTINGS):
            for name in options.only or (*NAMES, *(SLOW if options.slow else ())):
                if name in SLOW and interval < 180:
                    continue
                try:
                    for one in rows(marked, interval, (name,)):
                        print(line(one), flush=True)
                except ConfigError as error:
                    print(f"| {marked.name} | | {interval} s | {name} | {error} |", flush=True)


if __name__ == "__main__":
    main()
