"""A failure mode: its definition, from which detector, alert rule and playbook all take it."""

from __future__ import annotations

import msgspec


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
    look: tuple[str, ...]  # what to look at, in order
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
    limit: float | None = None  # that it is over or under; None where it only explains
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
    """What a series of windows shows."""

    healthy: bool  # whether nothing was wrong, as far as it was looked at
    windows: int
    seconds: float
    findings: tuple[ModeFinding, ...]  # causes first, then what follows from them
    not_judged: dict[str, str]  # modes whose signal nobody says, and what is missing
