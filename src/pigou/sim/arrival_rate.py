"""Arrival rates that change over time, and intended send times under them."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator
from itertools import pairwise

import msgspec
import numpy as np
from numpy.typing import NDArray

from pigou.config import ConfigError, check_bounds
from pigou.control.planner import config as planner_config
from pigou.request import SECOND
from pigou.small_file import read_text

#: Maximum seconds of a run, and of a wait. The control plane ticks ten times a second, on
#: idle days as well: a day takes seconds, a year nearly an hour.
MAX_SECONDS = planner_config.MAX_SECONDS
#: Variations of gaps: a burst is about cv^2 requests at once, then nothing for as many.
MIN_CV, MAX_CV = 1e-6, 1e3
#: Gaps drawn at once.
_CHUNK = 1024
#: Nanoseconds; later times are no integers of 64 bits.
_FAR = 2.0**62
_FORMS = "requests a second (5), RATE@SECOND/... (5@0/15@120), or FILE.csv with second,rate"


class RateSchedule(msgspec.Struct, frozen=True, kw_only=True):
    """Piecewise constant arrival rate; 0 before the first piece."""

    seconds: tuple[float, ...]  # start of each piece from the beginning, ascending
    rates: tuple[float, ...]  # requests per second in each piece; the last one never ends

    def __post_init__(self) -> None:
        for before, after in pairwise(self.seconds):
            if not before < after:
                raise ConfigError(
                    f"rate: second {after:g} comes after second {before:g}; let the seconds ascend"
                )
        for second in self.seconds:
            check_bounds("rate: second", second, ge=0, le=MAX_SECONDS, unit=" (a year)")
        for rate in self.rates:
            if rate and not 1 / MAX_SECONDS < rate < math.inf:
                raise ConfigError(
                    f"rate is {rate}; it must be 0, or above one request in a year, and finite"
                )
        if not any(self.rates):
            raise ConfigError("rate is 0 at all times; give one piece a rate above 0")

    @classmethod
    def of(cls, rate: float | RateSchedule) -> RateSchedule:
        """Return a schedule, constant for a number."""
        return rate if isinstance(rate, RateSchedule) else cls(seconds=(0.0,), rates=(rate,))

    @property
    def is_finite(self) -> bool:
        """Whether nothing arrives after its last second."""
        return not self.rates[-1]

    @property
    def changes(self) -> tuple[float, ...]:
        """Seconds at which the rate changes, the first included."""
        before = (-1.0, *self.rates)
        pieces = zip(self.seconds, before, self.rates, strict=False)
        return tuple(second for second, old, new in pieces if old != new)

    def at(self, second: float) -> float:
        """Return the rate at a time."""
        piece = int(np.searchsorted(self.seconds, second, side="right")) - 1
        return self.rates[piece] if piece >= 0 else 0.0

    def times(self, counts: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the second by which each of `counts` requests is expected; infinity if never."""
        starts, sums = self._sums()
        piece = np.searchsorted(sums, counts, side="right") - 1
        rates = np.array(self.rates)[piece]
        with np.errstate(divide="ignore", invalid="ignore"):
            times: NDArray[np.float64] = starts[piece] + (counts - sums[piece]) / rates
        times[rates == 0.0] = np.inf
        return times

    def _sums(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        starts = np.array(self.seconds)
        sums = np.cumsum(np.diff(starts) * np.array(self.rates)[:-1])
        return starts, np.concatenate(([0.0], sums))


def read_rate(text: str) -> float | RateSchedule:
    """Read `5`, `5@0/15@120/2@240`, or the name of a CSV file with `second,rate`."""
    if text.lower().endswith(".csv"):
        return _of_csv(text)
    try:
        if "@" not in text:
            return float(text)
        pieces = [part.split("@") for part in text.split("/")]
        return _schedule([(float(second), float(rate)) for rate, second in pieces])
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"rate is {text!r}; write {_FORMS}") from None


def _of_csv(path: str) -> RateSchedule:
    try:
        reader = csv.reader(io.StringIO(read_text(path), newline=""))
        rows = [(file_line, row) for file_line, row in enumerate(reader, 1) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"rate is {path!r}, and cannot be read: {error}") from None
    if rows and not _is_number(rows[0][1][0]):
        del rows[0]  # names of the columns
    if not rows:
        raise ConfigError(f"rate is {path!r}, and has no lines; write second,rate in each")
    pieces = []
    for line, row in rows:
        try:
            second, rate = map(float, row)
        except ValueError:
            raise ConfigError(
                f"rate is {path!r}: line {line} is {','.join(row)!r}; write second,rate"
            ) from None
        pieces.append((second, rate))
    return _schedule(pieces)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _schedule(pieces: list[tuple[float, float]]) -> RateSchedule:
    seconds, rates = zip(*pieces, strict=True)
    return RateSchedule(seconds=seconds, rates=rates)


def check_cv(name: str, cv: float) -> None:
    """Refuse a coefficient of variation of gaps that cannot be drawn; 0 is even gaps."""
    if cv and not MIN_CV <= cv <= MAX_CV:
        raise ConfigError(f"{name} is {cv}; it must be 0 (even gaps), or {MIN_CV:g} to {MAX_CV:g}")


def renewal_times(rate: float | RateSchedule, cv: float, rng: np.random.Generator) -> Iterator[int]:
    """Yield send times in nanoseconds, with Gamma gaps of mean 1/rate; raises ValueError.

    Shape 1/cv^2, scale cv^2/rate; cv 1 is Poisson, 0 a metronome. Under a schedule, gaps are in
    expected counts, which its inverse takes to times (cv 1: inhomogeneous Poisson).
    """
    if not isinstance(rate, RateSchedule) and not (math.isfinite(rate) and rate > 0):
        raise ValueError(f"rate is {rate}; it must be above 0 requests per second")
    check_cv("cv", cv)
    if isinstance(rate, RateSchedule):
        return _scheduled_times(rate, cv, rng)
    return _times(rate, cv, rng)


def _times(rate: float, cv: float, rng: np.random.Generator) -> Iterator[int]:
    mean = SECOND / rate
    last = 0.0
    while True:
        gaps = rng.gamma(1 / cv**2, mean * cv**2, _CHUNK) if cv else np.full(_CHUNK, mean)
        times = last + np.cumsum(gaps)
        last = float(times[-1])
        yield from np.minimum(times, _FAR).round().astype(np.int64).tolist()


def _scheduled_times(rate: RateSchedule, cv: float, rng: np.random.Generator) -> Iterator[int]:
    last = 0.0
    while True:
        gaps = rng.gamma(1 / cv**2, cv**2, _CHUNK) if cv else np.ones(_CHUNK)
        counts = last + np.cumsum(gaps)
        last = float(counts[-1])
        times = rate.times(counts)
        reached = times[np.isfinite(times)]
        yield from np.minimum(reached * SECOND, _FAR).round().astype(np.int64).tolist()
        if len(reached) < len(times):
            return
