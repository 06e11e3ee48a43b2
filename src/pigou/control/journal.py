"""Journal: a ControlPlane's messages and decisions, as JSON lines.

A run is a `JournalHead` and a `JournalEntry` per call; `replay_call` on a fresh plane yields the
same decisions. It has no tokens or texts, only lengths and block keys.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from pigou.config import ConfigError, ControlConfig
from pigou.control.messages import (
    Action,
    Assess,
    Assessed,
    CacheChanged,
    CacheKeyed,
    Decision,
    KeyedObservation,
    LoadReport,
    Observation,
    Submit,
    Tick,
    Tokens,
    WorkerUp,
)
from pigou.control.plane import ControlPlane
from pigou.control.planner.messages import PlannerDecision
from pigou.control.planner.planner import Planner, PlannerStarted, decide, writable
from pigou.control.prefix_index.index import KeyedEvent
from pigou.control.price_of_anarchy import PoAEstimate
from pigou.control.routing.policy import params_of
from pigou.request import NEVER, Request
from pigou.windows.planner_window import PlannerWindow

#: Version of the lines that are written. It rises when a line changes its meaning.
VERSION = 2

#: Records of a journal, one per call; KV events come without tokens.
Recorded: TypeAlias = KeyedObservation | Submit | Tokens | Tick | PlannerStarted | PlannerWindow

_T = TypeVar("_T")


class JournalError(ValueError):
    """A line is not a valid entry."""


class UnknownVersionError(JournalError):
    """The head has a version that cannot be read."""


class JournalHead(msgspec.Struct, kw_only=True, frozen=True, tag_field="k", tag="journal"):
    """First line of a run."""

    format: int  # `VERSION` of who wrote it
    pigou: str
    now: int  # a time of the clock that all entries have, in nanoseconds
    unix: int  # the same moment in nanoseconds since 1970
    config: ControlConfig


def journal_config(plane: ControlPlane) -> ControlConfig:
    """Return a plane's configuration with all policy defaults, for replay by later versions."""
    params = msgspec.to_builtins(dict(params_of(plane.router.policy)))
    finite = {k: v for k, v in params.items() if not isinstance(v, float) or math.isfinite(v)}
    return msgspec.structs.replace(plane.config, params=finite)


class JournalEntry(
    msgspec.Struct, kw_only=True, tag_field="k", tag="call", omit_defaults=True,
    forbid_unknown_fields=True,
):  # fmt: skip
    """A call: time, message, decisions, and type of the exception."""

    now: int  # nanoseconds
    message: Recorded
    out: list[Any] = []  # decisions, as `encoded_decisions` has them
    error: str = ""  # name of an exception's type; empty without one


class _NonFinite(float):
    """A number that JSON has no word for; it is written as a string."""


class _VersionLine(msgspec.Struct, tag_field="k", tag="journal"):
    format: int
    pigou: str = "that wrote it"


def _encode_value(value: object) -> Any:
    if isinstance(value, np.ndarray):
        words = np.ascontiguousarray(value, dtype="<u8").tobytes()
        return words if value.ndim == 1 else {"columns": value.shape[1], "words": words}
    if isinstance(value, _NonFinite):
        return repr(float(value))
    raise NotImplementedError(f"a journal cannot hold {type(value).__name__}")


def decode_value(kind: Any, value: Any) -> Any:
    """Decode an array of 64-bit words, (n,) or (n, columns), from base 64 (for msgspec)."""
    if getattr(kind, "__origin__", kind) is not np.ndarray:
        raise NotImplementedError(f"a journal cannot hold {kind}")
    try:
        if isinstance(value, str):
            return _words(value)
        return _words(value["words"]).reshape(-1, value["columns"])
    except (binascii.Error, TypeError, KeyError) as error:
        raise ValueError(f"words are not in base 64: {error}") from error


def _words(text: str) -> NDArray[np.uint64]:
    data = base64.b64decode(text, validate=True)
    return np.frombuffer(data, dtype="<u8").astype(np.uint64)  # writable, as other keys are


_encoder = msgspec.json.Encoder(enc_hook=_encode_value)
_heads = msgspec.json.Decoder(JournalHead)
_versions = msgspec.json.Decoder(_VersionLine)
_entries: msgspec.json.Decoder[JournalHead | JournalEntry] = msgspec.json.Decoder(
    JournalHead | JournalEntry,
    strict=False,  # numbers that are not finite are strings
    dec_hook=decode_value,
)


def encode(line: JournalHead | JournalEntry) -> bytes:
    """Encode a head or an entry as a line."""
    return _encoder.encode(line) + b"\n"


def decode(line: bytes) -> JournalHead | JournalEntry:
    """Decode a line of this version; raises JournalError for another."""
    try:
        return _entries.decode(line)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise JournalError(str(error)) from error


def decode_head(line: bytes, known: Sequence[int] = (VERSION,)) -> JournalHead | None:
    """Decode a head of a `known` version, else None; raises UnknownVersionError or JournalError."""
    if b'"journal"' not in line:
        return None
    try:
        version = _versions.decode(line)
    except (msgspec.MsgspecError, ValueError):
        return None
    if version.format not in known:
        numbers = " and ".join(map(str, sorted(known)))
        raise UnknownVersionError(
            f"the journal's version is {version.format}, and this Pigou reads {numbers}; "
            f"read it with the Pigou {version.pigou}"
        )
    try:
        return _heads.decode(line)
    except (msgspec.MsgspecError, ValueError) as error:
        raise JournalError(str(error)) from error


def encoded_decisions(decisions: Sequence[Decision | Action | PlannerDecision]) -> list[Any]:
    """Return decisions as they are read back from a journal."""
    decoded: list[Any] = msgspec.json.decode(_encoder.encode(_without_snapshots(decisions)))
    return decoded


def replay_call(plane: ControlPlane, entry: JournalEntry) -> tuple[list[Any], str]:
    """Replay an entry; return its `encoded_decisions`, and the error raised, if any."""
    message, now = entry.message, entry.now
    if isinstance(message, PlannerStarted | PlannerWindow):
        raise TypeError(f"{type(message).__name__} is a planner's (`PlannerReplay`)")
    decisions: Sequence[Decision | Action] = ()
    try:
        if isinstance(message, Submit):
            decisions = [plane.submit(message.request, now, frozenset(message.exclude))]
        elif isinstance(message, Tokens):
            report_tokens(plane, message.counts, now)
        elif isinstance(message, Tick):
            decisions = plane.tick(now)
        else:
            decisions = plane.observe(message, now)
    except Exception as error:
        return [], type(error).__name__
    return encoded_decisions(decisions), ""


def report_tokens(plane: PlaneCalls, counts: Sequence[tuple[str, int]], now: int) -> None:
    """Report tokens by request id; requests without a slot are skipped."""
    known = [(slot, count) for request, count in counts if (slot := plane.slot(request)) >= 0]
    if known:
        slots, numbers = np.array(known, dtype=np.int64).T.copy()
        plane.on_tokens(slots, numbers, now)


class JournalRecorder:
    """Makes calls and writes an entry for each, also on an exception."""

    def __init__(self, plane: ControlPlane, write: Callable[[JournalEntry], None]) -> None:
        self._plane = plane
        self._write = write

    def submit(self, request: Request, now: int, exclude: frozenset[str] = frozenset()) -> Decision:
        """Record `ControlPlane.submit`; immediate refusals change nothing and are left out."""
        message = Submit(_without_tenure(request), tuple(sorted(exclude)))
        entry = JournalEntry(now=now, message=message)
        return self._record(entry, lambda: [self._plane.submit(request, now, exclude)])[0]

    def observe(self, observation: Observation, now: int) -> Sequence[Decision]:
        """Record `ControlPlane.observe`; KV events by keys, not tokens."""
        if isinstance(observation, CacheChanged):
            return self._cache_changed(observation, now)
        entry = JournalEntry(now=now, message=_written(observation))
        return self._record(entry, lambda: self._plane.observe(observation, now))

    def slot(self, request: str) -> int:
        """Return `ControlPlane.slot`, which changes nothing."""
        return self._plane.slot(request)

    def on_tokens(self, slots: NDArray[np.int64], counts: NDArray[np.int64], now: int) -> None:
        """Record `ControlPlane.on_tokens`, by request id."""
        requests = self._plane.requests_in(slots)
        message = Tokens(tuple(zip(requests, counts.tolist(), strict=True)))
        entry = JournalEntry(now=now, message=message)

        def call() -> Sequence[Decision]:
            self._plane.on_tokens(slots, counts, now)
            return ()

        self._record(entry, call)

    def tick(self, now: int) -> Sequence[Action]:
        """Record `ControlPlane.tick`."""
        return self._record(JournalEntry(now=now, message=Tick()), lambda: self._plane.tick(now))

    def _cache_changed(self, changed: CacheChanged, now: int) -> Sequence[Decision]:
        """Apply events one by one: keys depend on the events before."""
        keyed: list[KeyedEvent] = []
        worker = changed.worker

        def call() -> Sequence[Decision]:
            decisions = [*self._plane.observe(CacheChanged(worker, ()), now)]
            try:
                for event in changed.events:
                    keyed.append(self._plane.index.keyed(worker, event))
                    decisions += self._plane.observe(CacheKeyed(worker, (keyed[-1],)), now)
            finally:
                entry.message = CacheKeyed(worker, tuple(keyed))
            return decisions

        entry = JournalEntry(now=now, message=CacheKeyed(worker, ()))
        return self._record(entry, call)

    def _record(self, entry: JournalEntry, call: Callable[[], Sequence[_T]]) -> Sequence[_T]:
        try:
            decisions = call()
        except ConfigError:
            raise
        except Exception as error:
            entry.error = type(error).__name__
            self._write(entry)
            raise
        entry.out = _without_snapshots(decisions)
        self._write(entry)
        return decisions


#: Control plane as a driver calls it.
PlaneCalls: TypeAlias = ControlPlane | JournalRecorder


def _without_snapshots(decisions: Sequence[Any]) -> list[Any]:
    return [{"kind": "assess"} if type(made) is Assess else made for made in decisions]


def _without_tenure(request: Request) -> Request:
    overrides = {name: _writable(value) for name, value in request.overrides.items()}
    return msgspec.structs.replace(request, overrides=overrides, expiry=NEVER)


def _written(observation: Observation) -> Recorded:
    match observation:
        case WorkerUp(worker):
            return WorkerUp(replace(worker, url=""))
        case LoadReport():
            return msgspec.structs.replace(observation, kv_usage=_writable(observation.kv_usage))
        case Assessed(poa):
            return Assessed(_finite(poa))
        case CacheChanged():
            raise TypeError("KV events with tokens are no part of a journal: key them first")
        case _:
            return observation


def _writable(value: float) -> float:
    return value if math.isfinite(value) else _NonFinite(value)


def _finite(poa: PoAEstimate | None) -> PoAEstimate | None:
    try:
        return msgspec.json.decode(msgspec.json.encode(poa), type=PoAEstimate | None)
    except msgspec.ValidationError:  # infinite parts are null in JSON
        return None


def planner_entry(
    message: PlannerStarted | PlannerWindow, now: int, decision: PlannerDecision | None = None,
    error: str = "",
) -> JournalEntry:  # fmt: skip
    """Return the entry of a planner's start, or of a window and its decision."""
    out = [] if decision is None else [decision]
    return JournalEntry(now=now, message=writable(message), out=out, error=error)


class PlannerReplay:
    """Replays a planner's decisions from a run's entries."""

    def __init__(self) -> None:
        self._planner: Planner | None = None

    @staticmethod
    def takes(entry: JournalEntry) -> bool:
        """True for a planner's entry."""
        return isinstance(entry.message, PlannerStarted | PlannerWindow)

    def replay(self, entry: JournalEntry) -> tuple[list[Any], str]:
        """Return an entry's `encoded_decisions` and error; raises ConfigError before a start."""
        message = entry.message
        if isinstance(message, PlannerStarted):
            self._planner = message.make()
            return [], ""
        assert isinstance(message, PlannerWindow)
        if self._planner is None:
            raise ConfigError("journal: a planner's window comes before the planner's start")
        try:
            return encoded_decisions([decide(self._planner, message)]), ""
        except Exception as error:
            return [], type(error).__name__
