"""A failure mode, its findings, and building blocks of detectors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import msgspec
import numpy as np

from pigou.windows.observations import FleetObservation

Series: TypeAlias = Sequence[FleetObservation]
#: Multiples of the minimum duration for medium and high confidence.
_TWICE, _FOUR_TIMES = 2.0, 4.0


class FailureMode(msgspec.Struct, frozen=True, kw_only=True):
    """One way in which a fleet serves badly; texts may name limits (`{kv_usage:.0%}`)."""

    number: int  # 1 to 19, as in the literature
    name: str
    symptom: str
    cause: str
    signal: str
    limits: dict[str, float] = {}  # `seconds` is how long the signal must last
    smallest_fix: str  # by options that exist
    remedy: str = ""  # advice where no option helps
    look: tuple[str, ...]  # playbook steps in order
    # modes that often follow; with it they are no findings of their own
    follows: tuple[int, ...] = ()
    alert: str = ""  # PromQL of its alert rule; "" if no metric shows the signal
    alert_for: str = "1m"  # duration for which that must hold

    @property
    def lasts_s(self) -> float:
        """Seconds the signal must last; 0 if once is enough."""
        return self.limits.get("seconds", 0.0)

    def text(self, template: str) -> str:
        """Return a text with the limits filled in."""
        return template.format_map(self.limits)


class ModeEvidence(msgspec.Struct, frozen=True):
    """A figure of a finding."""

    name: str
    value: float
    unit: str
    limit: float | None = None  # crossed threshold; None if it only explains
    where: str = ""  # worker or tenant; "" for the fleet


class ModeFinding(msgspec.Struct, frozen=True, kw_only=True):
    """A failure mode shown by a series of windows."""

    number: int
    mode: str
    # low, medium or high: the signal lasted one, two or four times the minimum; unmistakable is
    # high
    confidence: str
    from_s: float  # span of the windows that show it
    to_s: float
    evidence: tuple[ModeEvidence, ...]
    follows_from: int = 0  # number of the causing finding; 0 for none
    smallest_fix: str
    remedy: str


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """The findings in a series of windows."""

    healthy: bool  # whether nothing was found among the judged modes
    windows: int
    seconds: float
    findings: tuple[ModeFinding, ...]  # causes before consequences
    not_judged: dict[str, str]  # modes without a signal, and what is missing


class SignalMissing(Exception):
    """A detector's signal is not reported; the message names it."""


def need(values: Iterable[object], what: str) -> None:
    """Raise SignalMissing if all values are None."""
    if all(value is None for value in values):
        raise SignalMissing(what)


def stretch(series: Series, mode: FailureMode, shows: Callable[[FleetObservation], bool]) -> Series:
    """Return the longest stretch that shows a signal, if long enough."""
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
    """Return the mean of the known values; 0 without any."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else 0.0


def median(values: Iterable[float | None]) -> float:
    """Return the median of the known values; 0 without any."""
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else 0.0


def correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Pearson's correlation; 0 if either is constant."""
    if len(first) < 2 or not np.std(first) or not np.std(second):
        return 0.0
    return float(np.corrcoef(first, second)[0, 1])


def finding(
    mode: FailureMode, shown: Series, evidence: Sequence[ModeEvidence], *, certain: bool = False
) -> ModeFinding:
    """Return the finding of a mode for a stretch of windows."""
    times = _seconds(shown) / (mode.lasts_s or shown[0].seconds * _TWICE)
    confidence = "medium" if times >= _TWICE else "low"
    if certain or times >= _FOUR_TIMES:
        confidence = "high"
    return ModeFinding(
        number=mode.number, mode=mode.name, confidence=confidence, from_s=shown[0].start_s,
        to_s=shown[-1].start_s + shown[-1].seconds, evidence=tuple(evidence),
        smallest_fix=mode.text(mode.smallest_fix), remedy=mode.text(mode.remedy),
    )  # fmt: skip
