"""Hang detection: tells a slow worker from a hung one by its progress. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import msgspec

from pigou.wire.errors import DECODING_ERRORS

#: Extra seconds per planned token: a long prefill is no hang.
TOKEN_S = 0.01
#: Cap on the planned tokens that count.
_MAX_PLANNED_TOKENS = 2**20
#: Factor on the limit while the process computes, or the whole fleet is slow.
PATIENCE = 5.0


@dataclass(frozen=True, slots=True)
class EngineProgress:
    """Progress report of an engine."""

    busy: bool
    mark: Hashable  # changes whenever the engine makes progress
    planned_tokens: int = 0


class _EngineBody(msgspec.Struct):
    busy: bool
    beats: int
    planned_tokens: int = 0


class Health(msgspec.Struct, frozen=True):
    """The body of a worker's `/health`."""

    status: str = ""
    engine: _EngineBody | None = None

    @property
    def progress(self) -> EngineProgress | None:
        """Progress of the engine; None without one."""
        return None if self.engine is None else _engine_progress(self.engine)


def read_health(body: bytes) -> Health:
    """Return the content of a `/health` body; empty where it has another shape."""
    try:
        return msgspec.json.decode(body, type=Health)
    except DECODING_ERRORS:
        return Health()


def read_heartbeat(heartbeat: Any) -> EngineProgress | None:
    """Return a decoded heartbeat's progress, or None."""
    try:
        return _engine_progress(msgspec.convert(heartbeat, _EngineBody))
    except msgspec.ValidationError:
        return None


def _engine_progress(engine: _EngineBody) -> EngineProgress:
    tokens = min(max(engine.planned_tokens, 0), _MAX_PLANNED_TOKENS)
    return EngineProgress(engine.busy, engine.beats, tokens)


class HangDetector:
    """Adds up a worker's seconds without progress or answer, while the watcher is on time."""

    def __init__(self, hang_s: float, failures: int) -> None:
        self._hang_s = hang_s  # seconds without progress until an engine counts as hung; 0 never
        self._failures = failures  # consecutive checks a stopped process may miss
        self._mark: Hashable = None
        self._planned_tokens = 0
        self._heard = False
        self.still_s = 0.0
        self.silent_s = 0.0
        self.silent_looks = 0  # in a row

    def observe(self, progress: EngineProgress | None, passed_s: float) -> None:
        """Record an answered check; None without engine progress."""
        self.silent_s, self.silent_looks = 0.0, 0
        self._heard = False
        self._compare(progress, passed_s)

    def miss(self, passed_s: float, heard: EngineProgress | None = None) -> None:
        """Record an unanswered check; `heard` is progress from elsewhere."""
        self.silent_s += passed_s
        self._heard = heard is not None
        if heard is None:
            self.silent_looks += 1
        else:
            self.silent_looks = 0
            self._compare(heard, passed_s)

    def _compare(self, progress: EngineProgress | None, passed_s: float) -> None:
        if progress is None or not progress.busy or progress.mark != self._mark:
            self.still_s = 0.0
        else:
            self.still_s += passed_s
        self._mark = None if progress is None else progress.mark
        self._planned_tokens = 0 if progress is None else progress.planned_tokens

    @property
    def limit_s(self) -> float:
        """Allowed seconds without progress for the present work; 0 for no limit."""
        return self._hang_s and self._hang_s + TOKEN_S * self._planned_tokens

    @property
    def slow(self) -> bool:
        """Whether the worker lags noticeably, hung or not."""
        still = bool(self.limit_s) and self.still_s > self.limit_s / 2
        return still or self.silent_looks >= max(1, self._failures - 1)

    def verdict(
        self, *, stopped: bool = False, computes: bool = False, is_outlier: bool = True
    ) -> str:
        """Return why the worker counts as hung, or ""; flags are of its process."""
        limit_s = self.limit_s
        patience = 1.0 if is_outlier else PATIENCE
        if limit_s and self.still_s > limit_s * patience:
            return f"its engine has work, and made no progress for {self.still_s:.0f} s"
        if stopped and is_outlier and self.silent_looks >= self._failures:
            return f"its process is stopped, and {self.silent_looks} looks got no answer"
        lives = computes or self._heard
        if limit_s and self.silent_s > limit_s * (PATIENCE if lives else patience):
            return f"it did not answer for {self.silent_s:.0f} s"
        return ""


class HangArbiter:
    """Judges the workers of a fleet one at a time."""

    def __init__(self, hang_s: float) -> None:
        """Begin without workers; `hang_s` is the longest pause between two verdicts."""
        self._wait_s = hang_s
        self._detectors: dict[str, HangDetector] = {}
        self._since_s = 0.0
        self.declared = ""  # id of the worker last declared hung, until it is back

    def add(self, worker: str, detector: HangDetector) -> None:
        """A worker is up, and watched."""
        self._detectors[worker] = detector
        if self.declared == worker:
            self.declared = ""

    def remove(self, worker: str) -> None:
        """A worker is watched no more."""
        self._detectors.pop(worker, None)

    def is_outlier(self, worker: str) -> bool:
        """Whether a worker is slow and another is not, or there is no other to compare it with."""
        others = [detector for name, detector in self._detectors.items() if name != worker]
        return not others or any(not detector.slow for detector in others)

    def declare_hung(self, worker: str, now_s: float) -> bool:
        """Declare a worker hung, unless another is; return whether it was declared."""
        if self.declared and now_s - self._since_s < self._wait_s:
            return False
        self.declared, self._since_s = worker, now_s
        return True
