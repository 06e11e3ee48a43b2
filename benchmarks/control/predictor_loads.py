"""Loads for `benchmarks.control.predictors`: recorded days, cut into intervals."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pigou.workload.trace_formats import read_trace

Floats = NDArray[np.float64]
DAY = 86_400.0
#: Seconds in which ServeGen's rates, and its lengths, stay as they are.
_RATES, _LENGTHS = 600.0, 21_600.0


@dataclass(frozen=True)
class Arrivals:
    """Requests in order of time."""

    name: str
    days: int
    times: Floats  # seconds
    isl: Floats  # prompt tokens
    osl: Floats  # output tokens

    def counts(self, interval: float) -> Floats:
        """Return the requests of each interval."""
        number = round(self.days * DAY / interval)
        return np.histogram(self.times, number, (0.0, self.days * DAY))[0].astype(float)

    def means(self, lengths: Floats, interval: float) -> Floats:
        """Return the mean length in each interval, NaN where nobody came."""
        number = round(self.days * DAY / interval)
        sums = np.histogram(self.times, number, (0.0, self.days * DAY), weights=lengths)[0]
        counts = self.counts(interval)
        return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def stretched(name: str, path: Path) -> Arrivals:
    """Return a trace whose time is stretched to a day; each request stays one."""
    rows = [
        (session.start, session.turns[0].input, session.turns[0].output)
        for session in read_trace(path).sessions
    ]
    times, isl, osl = np.array(sorted(rows), dtype=float).T
    times = (times - times[0]) * (DAY / (times[-1] - times[0])) * (1 - 1e-9)
    return Arrivals(name, 1, times, isl, osl)


def servegen(name: str, folder: Path, parity: int, days: int = 2) -> Arrivals:
    """Draw ServeGen's clients of even or odd number: renewal processes, the same rates each day.

    Gaps of a client are Gamma or Weibull variables of the shape and scale in its row, for 600 s;
    lengths come from its histograms of six hours.
    """
    parts = []
    for path in sorted(folder.glob("chunk-*-trace.csv")):
        number = int(path.name.split("-")[1])
        if number % 2 == parity:
            lengths = json.loads((folder / f"chunk-{number}-dataset.json").read_text())
            for day in range(days):
                rng = np.random.default_rng((number, day))
                times = np.concatenate([[], *_times(path, rng)])
                isl, osl = _lengths(times, lengths, rng)
                parts.append(np.stack([times + day * DAY, isl, osl]))
    table = np.concatenate(parts, axis=1)
    times, isl, osl = table[:, np.argsort(table[0], kind="stable")]
    return Arrivals(name, days, times, isl, osl)


def _times(path: Path, rng: np.random.Generator) -> Iterator[Floats]:
    for line in path.read_text().splitlines():
        cells = line.split(",")
        start, rate = float(cells[0]), float(cells[1])
        if rate > 0 and cells[3:4] and cells[3] in ("Gamma", "Weibull"):
            shape, scale = float(cells[4]), float(cells[5])
            size = math.ceil(2 * rate * _RATES) + 50
            draws = (
                rng.gamma(shape, scale, size)
                if cells[3] == "Gamma"
                else scale * rng.weibull(shape, size)
            )
            # A window begins at a random point of the process.
            times = np.cumsum(draws) - rng.uniform(0, draws[0])
            yield start + times[(times >= 0) & (times < _RATES)]
        elif rate > 0:
            yield start + np.sort(rng.uniform(0, _RATES, rng.poisson(rate * _RATES)))


def _lengths(
    times: Floats, tables: dict[str, dict[str, str]], rng: np.random.Generator
) -> tuple[Floats, Floats]:
    isl, osl = np.ones(len(times)), np.ones(len(times))
    for start, table in tables.items():
        inside = (times >= float(start)) & (times < float(start) + _LENGTHS)
        for lengths, key in ((isl, "input_tokens"), (osl, "output_tokens")):
            histogram = ast.literal_eval(table[key]) if key in table else {}
            weights = np.array(list(histogram.values()), dtype=float)
            if weights.sum() > 0:
                values = np.array(list(histogram), dtype=float)
                lengths[inside] = rng.choice(values, inside.sum(), p=weights / weights.sum())
    return isl, osl


def all_arrivals(folder: Path) -> Iterator[tuple[Arrivals, bool]]:
    """Yield every trace, and whether constants were chosen on it."""
    yield stretched("azure-code", folder / "azure" / "AzureLLMInferenceTrace_code.csv.zst"), True
    yield servegen("servegen-even", folder / "servegen-deepseek-r1", 0), True
    path = folder / "mooncake" / "conversation_trace.jsonl.zst"
    yield stretched("mooncake-conversation", path), False
    yield servegen("servegen-odd", folder / "servegen-deepseek-r1", 1), False
