"""The journal's lines: all that a ControlPlane was told, and what it decided, as JSON.

A run is a `Head` and the entries after it, in the order of the calls. Fed to a fresh ControlPlane
of the head's configuration (`feed`), they yield the same decisions. Neither tokens nor texts are
in it: prompts are lengths and 64-bit keys of blocks, and addresses of workers are left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias, assert_never

import msgspec
import numpy as np
from numpy.typing import NDArray

from pigou.config import ControlConfig
from pigou.control.assessment import Assessment
from pigou.control.index.keyed import Keyed
from pigou.control.messages import (
    Action,
    Assess,
    Assessed,
    CacheChanged,
    CacheLost,
    Decision,
    Ended,
    FirstToken,
    GroupEnded,
    LoadReport,
    Observation,
    PrefillDone,
    ReadFailed,
    Tokens,
    WorkerDown,
    WorkerUp,
)
from pigou.control.plane import ControlPlane
from pigou.request import NEVER, FinishReason, Request, Worker
from pigou.wire.kv_event_decoding import Cleared, Removed

#: Rises when a line changes its meaning.
FORMAT = 1

Words: TypeAlias = NDArray[np.uint64]


class Head(msgspec.Struct, kw_only=True, tag_field="k", tag="journal"):
    """The first line of a run.

    Attributes:
        format: `FORMAT` of who wrote it.
        pigou: its version.
        now: a time of the clock that all entries have, in nanoseconds.
        unix: the same moment in nanoseconds since 1970.
        config: of the control plane.
    """

    format: int
    pigou: str
    now: int
    unix: int
    config: ControlConfig


class _Entry(
    msgspec.Struct, kw_only=True, tag_field="k", omit_defaults=True, forbid_unknown_fields=True
):
    """A call: when, what it returned (`shown`), and the type of what it raised."""

    now: int
    out: list[Any] = []
    error: str = ""


class Submit(_Entry, tag="submit"):
    """A request; words are little-endian and in base 64."""

    id: str
    prompt: int
    most: int
    priority: int = 0
    arrival: int = 0
    deadline: int = NEVER
    tenant: str = ""
    remote: int = 0
    hold: bool = False
    streamed: bool = True
    splits: bool = True
    hashes: bytes = b""
    keys: dict[int, bytes] = {}
    overrides: dict[str, str] = {}
    exclude: list[str] = []
    sequences: int = 1
    group: str = ""
    held: int = 0
    held_tokens: int = 0


class Up(_Entry, tag="up"):
    """`WorkerUp`, without the address."""

    worker: Worker


class Down(_Entry, tag="down"):
    """`WorkerDown`."""

    worker: str


class Prefilled(_Entry, tag="prefilled"):
    """`PrefillDone`."""

    id: str
    well: bool = True


class Unread(_Entry, tag="unread"):
    """`ReadFailed`."""

    id: str


class First(_Entry, tag="first"):
    """`FirstToken`."""

    id: str


class More(_Entry, tag="tokens"):
    """`Tokens`."""

    id: str
    count: int


class End(_Entry, tag="end"):
    """`Ended`."""

    id: str
    reason: FinishReason


class GroupEnd(_Entry, tag="group"):
    """`GroupEnded`."""

    id: str


class _Stored(msgspec.Struct, tag="stored", array_like=True):
    hashes: bytes
    keys: bytes
    parent: int | None
    medium: str | None


class _Removed(msgspec.Struct, tag="removed", array_like=True):
    hashes: bytes
    medium: str | None


class _Cleared(msgspec.Struct, tag="cleared", array_like=True):
    pass


class Cache(_Entry, tag="cache"):
    """`CacheChanged`, its blocks keyed (`PrefixIndex.keyed`)."""

    worker: str
    events: list[_Stored | _Removed | _Cleared]


class Lost(_Entry, tag="lost"):
    """`CacheLost`."""

    worker: str


class Load(_Entry, tag="load"):
    """`LoadReport`; JSON has no word for a usage that is not finite."""

    worker: str
    running: int
    waiting: int
    usage: float | str


class Judged(_Entry, tag="assessed"):
    """`Assessed`; no decision depends on what was found."""

    found: Any = None


class Tick(_Entry, tag="tick"):
    """`ControlPlane.tick`."""


Entry: TypeAlias = (
    Submit | Up | Down | Prefilled | Unread | First | More | End | GroupEnd | Cache | Lost | Load
    | Judged | Tick
)  # fmt: skip

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Head | Entry] = msgspec.json.Decoder(
    Head | Entry,
    strict=False,  # numbers above 64 bits are strings
)


class JournalError(ValueError):
    """A line that is no entry."""


def encode(entry: Head | Entry) -> bytes:
    """Return an entry as a line."""
    return _encoder.encode(entry) + b"\n"


def decode(line: bytes) -> Head | Entry:
    """Return the entry of a line.

    Raises:
        JournalError: it is none, or one of a later format.
    """
    try:
        entry = _decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
        raise JournalError(str(error)) from error
    if isinstance(entry, Head) and entry.format != FORMAT:
        raise JournalError(f"format {entry.format} is not known; read it with {entry.pigou}")
    return entry


def shown(decisions: Sequence[Decision | Action]) -> list[Any]:
    """Return decisions as an entry has them; what an `Assess` asks for follows from the rest."""
    return [{"assess": True} if isinstance(each, Assess) else each for each in decisions]


def plain(out: list[Any]) -> list[Any]:
    """Return decisions as they are read back, to be compared."""
    found: list[Any] = msgspec.json.decode(_encoder.encode(out))
    return found


def submitted(request: Request, now: int, exclude: frozenset[str]) -> Submit:
    """Return the entry of a submitted request."""
    return Submit(
        now=now, id=request.id, prompt=request.prompt, most=request.max_tokens,
        priority=request.priority, arrival=request.arrival, deadline=request.deadline,
        tenant=request.tenant, remote=request.remote, hold=request.hold,
        streamed=request.streamed, splits=request.splits, hashes=_bytes(request.hashes),
        keys={size: _bytes(keys) for size, keys in request.keys.items()},
        overrides={name: repr(float(value)) for name, value in request.overrides.items()},
        exclude=sorted(exclude), sequences=request.sequences, group=request.group,
        held=request.held,
        held_tokens=request.held_tokens,
    )  # fmt: skip


def request_of(entry: Submit) -> Request:
    """Return the request of its entry."""
    return Request(
        id=entry.id, prompt=entry.prompt, max_tokens=entry.most,
        hashes=_words(entry.hashes).reshape(-1, 2), priority=entry.priority,
        arrival=entry.arrival, deadline=entry.deadline, tenant=entry.tenant,
        remote=entry.remote, hold=entry.hold,
        keys={size: _words(keys) for size, keys in entry.keys.items()},
        overrides={name: float(value) for name, value in entry.overrides.items()},
        streamed=entry.streamed, splits=entry.splits, sequences=entry.sequences, group=entry.group,
        held=entry.held,
        held_tokens=entry.held_tokens,
    )  # fmt: skip


def observed(observation: Observation, now: int) -> Entry:  # noqa: PLR0911, PLR0912 (one for each)
    """Return the entry of an observation.

    Raises:
        TypeError: its KV events are not keyed.
    """
    match observation:
        case WorkerUp(worker):
            return Up(now=now, worker=replace(worker, url=""))
        case WorkerDown(name):
            return Down(now=now, worker=name)
        case PrefillDone(request, well):
            return Prefilled(now=now, id=request, well=well)
        case ReadFailed(request):
            return Unread(now=now, id=request)
        case FirstToken(request):
            return First(now=now, id=request)
        case Tokens(request, count):
            return More(now=now, id=request, count=count)
        case Ended(request, reason):
            return End(now=now, id=request, reason=reason)
        case GroupEnded(group):
            return GroupEnd(now=now, id=group)
        case CacheChanged(name, events):
            return Cache(now=now, worker=name, events=[told(each) for each in events])
        case CacheLost(name):
            return Lost(now=now, worker=name)
        case LoadReport(name, running, waiting, usage):
            said = usage if math.isfinite(usage) else repr(usage)
            return Load(now=now, worker=name, running=running, waiting=waiting, usage=said)
        case Assessed(found):
            return Judged(now=now, found=found)
        case _:
            assert_never(observation)


def observation_of(entry: Entry) -> Observation:  # noqa: PLR0911 (one for each)
    """Return the observation of an entry.

    Raises:
        TypeError: it is of another call.
    """
    match entry:
        case Up(worker=worker):
            return WorkerUp(worker)
        case Down(worker=name):
            return WorkerDown(name)
        case Prefilled(id=request, well=well):
            return PrefillDone(request, well)
        case Unread(id=request):
            return ReadFailed(request)
        case First(id=request):
            return FirstToken(request)
        case More(id=request, count=count):
            return Tokens(request, count)
        case End(id=request, reason=reason):
            return Ended(request, reason)
        case GroupEnd(id=group):
            return GroupEnded(group)
        case Cache(worker=name, events=events):
            return CacheChanged(name, tuple(_event(each) for each in events))
        case Lost(worker=name):
            return CacheLost(name)
        case Load(worker=name, running=running, waiting=waiting, usage=usage):
            return LoadReport(name, running, waiting, float(usage))
        case Judged(found=found):
            return Assessed(_assessment(found))
    raise TypeError(f"{type(entry).__name__} is no observation")


def feed(plane: ControlPlane, entry: Entry) -> tuple[list[Any], str]:
    """Make the call of an entry; return what it returned (`plain`), and the error that it raised.

    Whatever it raises is the result: an error that was recorded must come again.
    """
    try:
        match entry:
            case Submit():
                request = request_of(entry)
                decisions: Sequence[Decision | Action]
                decisions = [plane.submit(request, entry.now, frozenset(entry.exclude))]
            case Tick():
                decisions = plane.tick(entry.now)
            case _:
                decisions = plane.observe(observation_of(entry), entry.now)
    except Exception as error:
        return [], type(error).__name__
    return plain(shown(decisions)), ""


def told(event: Any) -> _Stored | _Removed | _Cleared:
    """Return a keyed event as an entry has it.

    Raises:
        TypeError: it is not keyed.
    """
    match event:
        case Keyed(hashes, keys, parent, medium):
            return _Stored(_bytes(hashes), _bytes(keys), parent, medium)
        case Removed(names, medium):
            return _Removed(_bytes(np.array(names, dtype=np.uint64)), medium)
        case Cleared():
            return _Cleared()
    raise TypeError(f"a journal has no entry for {type(event).__name__}: key it first")


def _event(each: _Stored | _Removed | _Cleared) -> Keyed | Removed | Cleared:
    match each:
        case _Stored():
            return Keyed(_words(each.hashes), _words(each.keys), each.parent, each.medium)
        case _Removed():
            return Removed(tuple(_words(each.hashes).tolist()), each.medium)
    return Cleared()


def _assessment(found: Any) -> Assessment | None:
    try:
        return None if found is None else msgspec.convert(found, Assessment)
    except msgspec.ValidationError:  # infinite parts are null in JSON
        return None


def _bytes(words: Words) -> bytes:
    return np.ascontiguousarray(words, dtype="<u8").tobytes()


def _words(data: bytes) -> Words:
    return np.frombuffer(data, dtype="<u8").astype(np.uint64)
