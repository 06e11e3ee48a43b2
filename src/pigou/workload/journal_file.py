"""A journal's file, read: its runs and entries of any version, and the workload in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec

from pigou.config import ConfigError, check_bounds
from pigou.control import journal
from pigou.control.journal import (
    JournalEntry,
    JournalError,
    JournalHead,
    UnknownVersionError,
    decode_head,
    decode_value,
)
from pigou.control.lengths import LengthScore, Online
from pigou.control.messages import Ended, FirstToken, Submit, Tokens, WorkerUp
from pigou.control.price_of_anarchy import PoAEstimate
from pigou.request import NEVER, SECOND, FinishReason, Request
from pigou.workload.packed import unpacked
from pigou.workload.trace import Trace, TraceSession, Turn, ordered

#: Lines of version 1 had the message's fields beside `k`, `now`, `out` and `error`, under shorter
#: names; their decisions had no `kind`, and words were the same base 64. By `k`: the message's
#: kind, and today's name of each of its fields.
_MESSAGES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "up": ("worker_up", {"worker": "worker"}),
    "down": ("worker_down", {"worker": "worker"}),
    "prefilled": ("prefill_done", {"id": "request", "well": "well"}),
    "unread": ("read_failed", {"id": "request"}),
    "first": ("first_token", {"id": "request"}),
    "end": ("ended", {"id": "request", "reason": "reason"}),
    "group": ("group_ended", {"id": "group"}),
    "cache": ("cache_keyed", {"worker": "worker", "events": "events"}),
    "lost": ("cache_lost", {"worker": "worker"}),
    "load": (
        "load_report",
        {"worker": "worker", "running": "running", "waiting": "waiting", "usage": "kv_usage"},
    ),
    "assessed": ("assessed", {"found": "assessment"}),
    "tick": ("tick", {}),
    "tokens": ("tokens", {"id": "id", "count": "count"}),
    "submit": ("submit", {"exclude": "exclude"}),
}
#: Renamed fields of a request.
_REQUEST = {"most": "max_tokens"}
#: Fields of a KV event, which was an array.
_EVENTS = {
    "stored": ("hashes", "keys", "parent", "medium"),
    "removed": ("hashes", "medium"),
    "cleared": (),
}
#: A decision's kind, by a field that only it had.
_DECISIONS = {
    "choice": "route", "ahead": "queue", "retry_after": "shed", "worker": "recall",
    "assess": "assess",
}  # fmt: skip
#: Bytes of a line.
_MAX_LINE = 256 << 20


def decode_v1(line: bytes) -> JournalEntry:
    """Return the entry of a line of version 1; raise a JournalError for another."""
    try:
        fields: dict[str, Any] = msgspec.json.decode(line, type=dict[str, Any])
        entry: dict[str, Any] = {
            name: fields.pop(name) for name in ("now", "error") if name in fields
        }
        entry |= {"k": "call", "out": [_decision(decision) for decision in fields.pop("out", [])]}
        entry["message"] = _message(fields.pop("k"), fields)
        return msgspec.convert(entry, JournalEntry, strict=False, dec_hook=decode_value)
    except KeyError as error:
        raise JournalError(f"there is no {error}") from error
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise JournalError(str(error)) from error


def _decision(decision: dict[str, Any]) -> dict[str, Any]:
    kind = next(kind for field, kind in _DECISIONS.items() if field in decision)
    rest = {} if kind == "assess" else decision
    return {"kind": kind, **rest}


def _message(k: str, fields: dict[str, Any]) -> dict[str, Any]:
    kind, names = _MESSAGES[k]
    message: dict[str, Any] = {"kind": kind}
    if kind == "submit":
        exclude = fields.pop("exclude", [])
        return message | {"request": _request(fields), "exclude": exclude}
    message |= {names[field]: value for field, value in fields.items()}
    if kind == "tokens":
        return {"kind": kind, "counts": [(fields["id"], fields["count"])]}
    if kind == "cache_keyed":
        message["events"] = [_event(*event) for event in fields["events"]]
    if kind == "assessed":
        message["assessment"] = _finite(fields.get("found"))
    return message


def _request(fields: dict[str, Any]) -> dict[str, Any]:
    request = {_REQUEST.get(field, field): value for field, value in fields.items()}
    if request.get("hashes"):
        request["hashes"] = {"columns": 2, "words": request["hashes"]}
    return request


def _event(kind: str, *values: Any) -> dict[str, Any]:
    return {"kind": kind, **dict(zip(_EVENTS[kind], values, strict=True))}


def _finite(estimate: Any) -> Any:  # infinite parts were null
    try:
        msgspec.convert(estimate, PoAEstimate | None)
    except msgspec.ValidationError:
        return None
    return estimate


#: Reads a line that is no head, by the version of its run.
_READERS: Mapping[int, Callable[[bytes], JournalHead | JournalEntry]] = {
    journal.VERSION: journal.decode,
    1: decode_v1,
}


@dataclass(frozen=True, slots=True)
class JournalLine:
    """A line of a journal; `entry` is None where it was cut off when its writer was killed."""

    number: int
    entry: JournalHead | JournalEntry | None


def is_journal(first: bytes) -> bool:
    """Whether a file with this first line is a journal."""
    try:
        return decode_head(first) is not None
    except JournalError:  # another version, or broken: reading it raises the error
        return True


def lines(path: str | Path) -> Iterator[JournalLine]:
    """Yield a journal's lines, unpacked; the last may be cut off. Raises ConfigError."""
    broken: tuple[int, str] | None = None
    read = _READERS[journal.VERSION]
    number = 0
    try:
        with unpacked(path) as file:
            for number, line in enumerate(_bounded(file, path), 1):
                if not line.strip():
                    continue
                try:
                    head = decode_head(line, tuple(_READERS))
                    if head is None and number == 1:
                        raise JournalError("it is not the head of a journal")
                    entry = head or _checked(read(line))
                except UnknownVersionError as error:
                    raise ConfigError(f"journal: {path}, line {number}: {error}") from None
                except JournalError as error:
                    if broken or number == 1:
                        raise ConfigError(_wrong(path, *(broken or (number, str(error))))) from None
                    broken = (number, str(error))
                    continue
                if head is not None:
                    read = _READERS[head.format]
                elif broken:
                    raise ConfigError(_wrong(path, *broken))
                if broken:
                    yield JournalLine(broken[0], None)
                    broken = None
                yield JournalLine(number, entry)
    except (OSError, EOFError) as error:
        raise ConfigError(f"journal: {path} cannot be read ({error})") from error
    if number == 0:
        raise ConfigError(f"journal: {path} is empty")
    if broken:
        yield JournalLine(broken[0], None)


def entries(
    path: str | Path, on_cut: Callable[[int], object]
) -> Iterator[JournalHead | JournalEntry]:
    """Yield a journal's entries; call `on_cut` with the number of each line that was cut off."""
    for line in lines(path):
        if line.entry is None:
            on_cut(line.number)
        else:
            yield line.entry


def _bounded(file: IO[bytes], path: str | Path) -> Iterator[bytes]:
    """Yield lines; one without an end would fill the memory."""
    while line := file.readline(_MAX_LINE):
        if len(line) == _MAX_LINE:
            raise ConfigError(
                f"journal: {path} has a line of {_MAX_LINE} bytes or more; it is no journal"
            )
        yield line


def _checked(entry: JournalHead | JournalEntry) -> JournalHead | JournalEntry:
    for decision in entry.out if isinstance(entry, JournalEntry) else ():
        if not isinstance(decision, dict) or not isinstance(decision.get("kind"), str):
            raise JournalError(f"a decision of `out` has no kind: {str(decision)[:80]}")
    return entry


def _wrong(path: str | Path, number: int, why: str) -> str:
    return f"journal: line {number} of {path} is no entry ({why})"


@dataclass(slots=True)
class _RecordedRequest:
    request: Request
    start: int  # nanoseconds since 1970
    input: int
    output: int = 0
    routed: bool = False
    answered: bool = False
    shed: bool = False

    def is_load(self, reason: FinishReason | None) -> bool:
        if self.answered or self.shed:
            return True
        return self.routed and reason is not FinishReason.ERROR

    def tokens(self, mean_output: float) -> int:
        if self.shed and not self.answered:
            return max(1, round(min(self.request.max_tokens, mean_output)))
        return max(1, self.output)


def read_workload(path: str | Path) -> Trace:
    """Return the gateway's load as sessions of one turn; raises ConfigError.

    Outputs have the tokens that came, at least 1. Migrated requests count once. Shed requests get
    the mean output of the answered ones, at most their limit. Requests refused, or failed before a
    token, are left out. Block ids are renumbered at the fleet's smallest block size.
    """
    requests = list(_requests(path))
    if not requests:
        raise ConfigError(
            f"trace: {path} is a journal without requests that a worker served, or would have"
        )
    sizes = Counter(size for recorded in requests for size in recorded.request.keys)
    size = min((size for size, uses in sizes.items() if uses == max(sizes.values())), default=1)
    outputs = [recorded.output for recorded in requests if recorded.output]
    mean_output = sum(outputs) / len(outputs) if outputs else NEVER
    ids: dict[int, int] = {}
    sessions = []
    for number, recorded in enumerate(requests):
        keys = recorded.request.keys.get(size)
        blocks = (
            tuple(ids.setdefault(key, len(ids)) for key in keys.tolist())
            if keys is not None
            else ()
        )
        # What has no blocks shares nothing.
        scope = "journal" if blocks else str(number)
        turn = Turn(recorded.input, recorded.tokens(mean_output), blocks)
        start = (recorded.start - requests[0].start) / SECOND
        sessions.append(TraceSession(start, scope, (turn,), recorded.request.tenant))
    return ordered(float(size), sessions)


def train_lengths(path: str | Path, share: float) -> tuple[Online, LengthScore]:
    """Learn output lengths from the first `share` of a journal's answers, and score the others.

    The score is of one that learns nothing of the others, but has all answers in its model.
    """
    check_bounds("share", share, gt=0, lt=1)
    answered = [recorded for recorded in _requests(path) if recorded.output]
    cut = int(share * len(answered))
    if not 0 < cut < len(answered):
        raise ConfigError(
            f"journal: {path} has {len(answered)} answers; two are needed, to learn and to test"
        )
    online, score = Online(), LengthScore()
    for recorded in answered[:cut]:
        online.observe(recorded.request, recorded.output)
    for recorded in answered[cut:]:
        score.note(online.predict(recorded.request).rank, recorded.output)
    for recorded in answered[cut:]:
        online.observe(recorded.request, recorded.output)
    return online, score


def _requests(path: str | Path) -> Iterator[_RecordedRequest]:
    shift = max_capacity = 0
    recorded: dict[str, _RecordedRequest] = {}
    for line in lines(path):
        entry = line.entry
        if isinstance(entry, JournalHead):
            yield from _left(recorded)
            shift = entry.unix - entry.now
        elif entry is not None:
            match entry.message:
                case WorkerUp(worker):
                    held = worker.blocks * worker.block_size or NEVER  # it did not say
                    max_capacity = max(max_capacity, held)
                case Submit(request) if request.id not in recorded:
                    start = (min(request.arrival, entry.now) or entry.now) + shift
                    recorded[request.id] = _RecordedRequest(request, start, request.prompt)
                case FirstToken(id) if id in recorded:
                    recorded[id].answered = True
                case Tokens(counts):
                    _count_tokens(counts, recorded)
                case Ended(id, reason) if id in recorded:
                    ended = recorded.pop(id)
                    if ended.is_load(reason):
                        yield ended
                case _:
                    pass
            _note_decisions(entry, recorded, max_capacity or NEVER)
    yield from _left(recorded)


def _count_tokens(counts: Iterable[tuple[str, int]], recorded: dict[str, _RecordedRequest]) -> None:
    for id, count in counts:
        if id in recorded:
            recorded[id].output += count
            recorded[id].answered = True


def _left(recorded: dict[str, _RecordedRequest]) -> Iterator[_RecordedRequest]:
    yield from (request for request in recorded.values() if request.is_load(None))
    recorded.clear()


def _note_decisions(
    entry: JournalEntry, recorded: dict[str, _RecordedRequest], max_tokens: int
) -> None:
    for decision in entry.out:
        request = recorded.get(decision.get("request", ""))
        if request is None:
            continue
        if decision["kind"] == "route":
            request.routed = True
        elif decision["kind"] == "shed":
            request.shed = request.input <= max_tokens
