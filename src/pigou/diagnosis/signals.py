"""What all detectors are made of: stretches of windows, evidence, and what nobody says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import numpy as np

from pigou.diagnosis.mode import FailureMode, ModeEvidence, ModeFinding
from pigou.windows.observations import FleetObservation

Series: TypeAlias = Sequence[FleetObservation]
#: How much longer than it must a signal lasts that is sure, and very sure.
_TWICE, _FOUR_TIMES = 2.0, 4.0


class SignalMissing(Exception):
    """Nobody says what a detector looks at; the message says what."""


def need(values: Iterable[object], what: str) -> None:
    """Raise `SignalMissing` if all values are None."""
    if all(value is None for value in values):
        raise SignalMissing(what)


def stretch(series: Series, mode: FailureMode, shows: Callable[[FleetObservation], bool]) -> Series:
    """Return the longest stretch of windows that show a signal, if it lasts as long as it must."""
    best: list[FleetObservation] = []
    run: list[FleetObservation] = []
    for window in series:
        if shows(window):
            run.append(window)
            if _seconds(run) > _seconds(best):
                best = list(run)
        else:
            run = []
    return best if best and _seconds(best) >= mode.lasts_s else ()


def _seconds(series: Series) -> float:
    return sum(window.seconds for window in series)


def mean(values: Iterable[float | None]) -> float:
    """Return the mean of what is said; 0 without anything."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else 0.0


def median(values: Iterable[float | None]) -> float:
    """Return the median of what is said; 0 without anything."""
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else 0.0


def correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Pearson's correlation; 0 where one of the two does not vary."""
    if len(first) < 2 or not np.std(first) or not np.std(second):
        return 0.0
    return float(np.corrcoef(first, second)[0, 1])


def finding(
    mode: FailureMode, shown: Series, evidence: Sequence[ModeEvidence], *, certain: bool = False
) -> ModeFinding:
    """Return the finding of a mode that a stretch of windows shows."""
    times = _seconds(shown) / (mode.lasts_s or shown[0].seconds * _TWICE)
    confidence = "medium" if times >= _TWICE else "low"
    if certain or times >= _FOUR_TIMES:
        confidence = "high"
    return ModeFinding(
        number=mode.number, mode=mode.name, confidence=confidence, from_s=shown[0].start_s,
        to_s=shown[-1].start_s + shown[-1].seconds, evidence=tuple(evidence),
        smallest_fix=mode.text(mode.smallest_fix), remedy=mode.text(mode.remedy),
    )  # fmt: skip
