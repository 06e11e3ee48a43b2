"""A failure mode, its findings, and what detectors are made of: stretches, evidence, gaps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import msgspec
import numpy as np

from pigou.windows.observations import FleetObservation


class FailureMode(msgspec.Struct, frozen=True, kw_only=True):
    """One way in which a fleet fails to serve well.

    Texts may name limits in braces (`{kv_usage:.0%}`); `text` puts their values in.
    """

    number: int  # 1 to 19, as the literature counts them; in lower case
    name: str
    symptom: str
    cause: str
    signal: str
    limits: dict[str, float] = {}
    lasts_s: float = 0.0  # seconds for which the signal must last; 0 where once is enough
    smallest_fix: str
    remedy: str
    look: tuple[str, ...]  # steps of the playbook, in order
    # numbers of the modes that often follow from it; with it they are no findings of their own.
    follows: tuple[int, ...] = ()
    alert: str = ""  # PromQL of its alert rule; "" where no metric shows the signal
    alert_for: str = "1m"  # duration for which that must hold

    def text(self, template: str) -> str:
        """Return a text with the values of the limits in it."""
        return template.format_map(self.limits)


class ModeEvidence(msgspec.Struct, frozen=True):
    """A figure of a finding."""

    name: str
    value: float
    unit: str
    limit: float | None = None  # threshold that was crossed; None if it only explains
    where: str = ""  # the worker or tenant; "" for the fleet


class ModeFinding(msgspec.Struct, frozen=True, kw_only=True):
    """A failure mode that a series of windows shows."""

    number: int
    mode: str
    # low, medium or high: the signal lasted just as long as it must, twice, or four times as long;
    # what cannot be mistaken is high.
    confidence: str
    from_s: float  # the windows that show it
    to_s: float
    evidence: tuple[ModeEvidence, ...]
    follows_from: int = 0  # number of the finding that it follows from; 0 for none
    smallest_fix: str
    remedy: str


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """The findings in a series of windows."""

    healthy: bool  # whether nothing was wrong, as far as it was looked at
    windows: int
    seconds: float
    findings: tuple[ModeFinding, ...]  # causes first, then what follows from them
    not_judged: dict[str, str]  # modes whose signal nobody says, and what is missing


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
