"""Formats of recorded traces: each file is recognised by its content, and read into a `Trace`."""

from __future__ import annotations

import csv
import io
import json
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pigou.config import ConfigError
from pigou.small_file import read_text
from pigou.workload import journal_file, mooncake
from pigou.workload.mooncake import block_tokens
from pigou.workload.packed import name_of, packing, unpacked
from pigou.workload.trace import Trace, TraceSession, Turn, ordered, turn

#: Tokens in a block where rows have blocks and do not say.
_BLOCK = 16.0
#: Bytes of a file of sessions.
_MAX_SESSION = 1 << 30
T = TypeVar("T")
_LOG = "requests.jsonl"
_SESSION = ("block_size", "requests", "id")
_BOM = b"\xef\xbb\xbf"
_BLOCK_IN_NAME = re.compile(r"blksz_(\d+)")


class RequestResult(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True
):
    """What became of a request; seconds from the run's beginning."""

    outcome: str  # "done", or in a word why not
    intended_s: float  # when the client meant to send it
    sent_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    output_tokens: int = 0  # tokens received
    cached_tokens: int | None = None  # prompt tokens found in a prefix cache; None if unknown
    prefill_worker: str = ""
    decode_worker: str = ""
    reason: str = ""  # why it failed


class TraceRow(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True
):
    """A request of Pigou's own trace format, one a line."""

    input: int  # tokens of the prompt
    output: int  # tokens generated
    arrival_s: float | None = None  # when it is sent, in seconds
    think_s: float | None = None  # in place of arrival_s: seconds after the session's last request
    hash_ids: list[int] = []  # blocks of the prompt; equal ids are equal blocks in the file
    block: float | None = None  # tokens in a block, equal in all rows; None: 16, or what fits
    tenant: str | int = ""
    session: str | int = ""  # name of the conversation that it belongs to
    run: str = ""  # name of the run, where a file of `--requests` has several
    result: RequestResult | None = None  # by `--requests`; a replay does not read it


class VllmRow(msgspec.Struct, frozen=True):
    """A request of vLLM's bench: of its data set, in nanoseconds, or of its log, in seconds."""

    input_toks: int
    output_toks: int
    arrival_time_ns: int | None = None
    arrival_time: float | None = None

    def __post_init__(self) -> None:
        if (self.arrival_time_ns is None) == (self.arrival_time is None):
            raise ValueError("it needs arrival_time_ns or arrival_time, and not both")

    @property
    def seconds(self) -> float:
        """When it is sent."""
        if self.arrival_time is not None:
            return self.arrival_time
        return (self.arrival_time_ns or 0) / 1e9


@dataclass(slots=True)
class _Open:
    """A session whose rows are being read."""

    start: float
    row: int
    tenant: str
    name: str
    turns: list[Turn] = field(default_factory=list)

    def session(self) -> TraceSession:
        """Return it; one without blocks shares nothing, not even with the like."""
        scope = "trace" if any(turn_.blocks for turn_ in self.turns) else f"row {self.row}"
        return TraceSession(self.start, scope, tuple(self.turns), self.tenant, self.name)


def of_rows(rows: Sequence[TraceRow], numbers: Sequence[int] = (), block: float = 0.0) -> Trace:
    """Return a trace from rows: `arrival_s` begins a session, `think_s` continues it."""
    block = _block(rows, block)
    opened: list[_Open] = []
    last: dict[str, _Open] = {}
    if len(runs := dict.fromkeys(row.run for row in rows)) > 1:
        raise ConfigError(
            f"trace: its lines are of {len(runs)} runs, from {next(iter(runs))!r} on; keep those "
            "of one run"
        )
    for number, row in zip(numbers or count(1), rows, strict=False):
        name = str(row.session)
        if (row.arrival_s is None) == (row.think_s is None):
            raise ConfigError(f"trace: line {number} needs arrival_s or think_s, and not both")
        if row.input < 1 or row.output < 1:
            raise ConfigError(f"trace: line {number} has no tokens in input or output")
        if (len(row.hash_ids) - 1) * block >= row.input:
            raise ConfigError(
                f"trace: line {number} has {len(row.hash_ids)} hash_ids of {block:g} tokens for "
                f"an input of {row.input}; give `block`"
            )
        try:
            one = turn(row.input, row.output, row.hash_ids, row.think_s or 0.0)
        except ValueError as error:
            raise ConfigError(f"trace: line {number}: {error}") from error
        if row.arrival_s is not None:
            last[name] = _Open(row.arrival_s, number, str(row.tenant), name)
            opened.append(last[name])
        elif not name or name not in last:
            raise ConfigError(f"trace: line {number} has think_s, and no session before it")
        last[name].turns.append(one)
    places = [session.row for session in opened]
    return ordered(block, [session.session() for session in opened], places)


def _block(rows: Sequence[TraceRow], given: float) -> float:
    sizes = {row.block for row in rows if row.block is not None} | ({given} if given else set())
    if not sizes or None in {row.block for row in rows if row.hash_ids}:
        pairs = [(row.input, len(row.hash_ids)) for row in rows if row.hash_ids and not row.block]
        sizes.add(block_tokens(pairs, given, _BLOCK, "trace"))
    if len(sizes) > 1:
        raise ConfigError(f"trace: rows have blocks of {sorted(sizes)} tokens; they must be equal")
    size = sizes.pop()
    if not 0 < size < float("inf"):
        raise ConfigError(f"trace: block is {size}; it must be above 0")
    return size


def to_rows(trace: Trace) -> Iterator[TraceRow]:
    """Yield a trace as rows in the order of its sessions; blocks are numbered by first use."""
    trace.check_timed("arrival_s of each session must be known")
    ids: dict[tuple[str, int], int] = {}
    for session, name in zip(trace.sessions, session_names(trace), strict=True):
        for index, turn_ in enumerate(session.turns):
            yield TraceRow(
                arrival_s=None if index else session.start,
                think_s=turn_.think if index else None,
                input=turn_.input,
                output=turn_.output,
                hash_ids=[ids.setdefault((session.scope, b), len(ids)) for b in turn_.blocks],
                block=short(trace.block) if turn_.blocks else None,
                tenant=session.tenant,
                session=name,
            )


def session_names(trace: Trace) -> list[str]:
    """Return the names of a trace's sessions; those of several turns all have one."""
    taken = {session.name for session in trace.sessions}
    free = (name for n in count() if (name := f"session-{n}") not in taken)
    return [
        session.name or (next(free) if len(session.turns) > 1 else "") for session in trace.sessions
    ]


def short(number: float) -> float:
    """Return a whole number as an integer."""
    return int(number) if number == int(number) else number


def write_rows(path: Path, rows: Iterable[TraceRow]) -> int:
    """Write rows to a file, packed by its suffix; returns their number. Raises ConfigError."""
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"the folder of {str(path)!r} does not exist; make it first")
    encode = msgspec.json.Encoder().encode
    written = 0
    try:
        with packing(path) as file:
            for row in rows:
                file.write(encode(row) + b"\n")
                written += 1
    except OSError as error:
        raise ConfigError(str(error)) from None
    return written


def read_trace(path: str | Path, block: float = 0.0, unit: str = "") -> Trace:
    """Read a trace, its format told by its content.

    JSON lines of Pigou, Mooncake, Bailian, AIPerf, Dynamo or vLLM's bench; a gateway journal; CSV
    of Azure, BurstGPT or Vidur; agent sessions. `.gz` and `.zst` are unpacked; a folder stands for
    its `requests.jsonl`. `block` is tokens per block (0: inferred), `unit` s, ms, us, ns or "".
    """
    if not 0.0 <= block < float("inf"):
        raise ConfigError(f"trace: block is {block:g}; it must be above 0")
    if not str(path):
        raise ConfigError("trace: no file is named; name a file or a folder")
    path = Path(path)
    try:
        return _read(path, block, unit)
    except (
        OSError, EOFError, ValueError, KeyError, TypeError, RecursionError, tarfile.TarError,
        csv.Error,
    ) as error:  # fmt: skip
        if isinstance(error, ConfigError):
            raise
        if isinstance(error, FileNotFoundError):
            raise ConfigError(f"trace: {path} does not exist; name a file or a folder") from error
        what = f"{type(error).__name__}: {error}"
        raise ConfigError(f"trace: {path} cannot be read as a trace ({what})") from error


def _read(path: Path, block: float = 0.0, unit: str = "") -> Trace:
    if path.is_dir():
        return _folder(path)
    name = name_of(path)
    with unpacked(path) as file:
        if name.endswith(".tar"):
            return _agents(_members(io.BytesIO(file.read())), str(path))
        first = file.readline()
        if journal_file.is_journal(first):
            return journal_file.read_workload(path)
        data = (first + file.read()).removeprefix(_BOM)
    if name.endswith(".json"):
        return _agents([data.decode("utf-8")], str(path))
    if data.lstrip()[:1] == b"{":
        return _lines(data, name, str(path), block, unit)
    return _table(data.decode("utf-8"), str(path))


def _folder(path: Path) -> Trace:
    for log in (path / _LOG, path / "vllm" / _LOG):  # the vLLM run's own folder, or the one around
        if log.is_file():
            return _read(log)
    sessions = sorted(path.glob("*.json"))
    if not sessions:
        raise ConfigError(
            f"trace: {path} has no agent sessions (*.json) and no {_LOG} of a vLLM log; "
            "name the folder that has them"
        )
    return _agents((read_text(path_, _MAX_SESSION) for path_ in sessions), str(path))


def _members(file: io.BytesIO) -> Iterator[str]:
    with tarfile.open(fileobj=file) as archive:
        for member in sorted(archive.getmembers(), key=lambda member: member.name):
            opened = archive.extractfile(member) if member.name.endswith(".json") else None
            if opened is not None:
                yield opened.read().decode("utf-8-sig")


def _lines(data: bytes, name: str, path: str, block: float, unit: str) -> Trace:
    """Read JSON lines, of the kind that the first one is of; blank lines are skipped."""
    lines = [(at, line) for at, line in enumerate(data.splitlines(), 1) if line.strip()]
    numbers = [number for number, _ in lines]
    keys = _decoded(lines[:1], dict[str, Any], path)[0].keys()
    if "input_toks" in keys:
        return _vllm(_decoded(lines, VllmRow, path), numbers, path)
    if mooncake.KEYS & keys:
        rows = _decoded(lines, mooncake.decode_row, path)
        match = _BLOCK_IN_NAME.search(name)
        return mooncake.to_trace(rows, numbers, path, block, unit, int(match[1]) if match else 0)
    return of_rows(_decoded(lines, TraceRow, path), numbers, block)


def _decoded(lines: Sequence[tuple[int, bytes]], kind: Any, path: str) -> list[Any]:
    """Return the rows of numbered lines; whole numbers may be floats, or in quotes."""
    decode = kind
    if kind is not mooncake.decode_row:
        decode = msgspec.json.Decoder(kind, strict=False).decode
    rows = []
    for number, line in lines:
        try:
            rows.append(decode(line))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"trace: line {number} of {path}: {error}") from error
    return rows


def _vllm(rows: Sequence[VllmRow], numbers: Sequence[int], path: str) -> Trace:
    sessions: list[TraceSession] = []
    for number, row in zip(numbers, rows, strict=True):
        with _line(number, path):
            one = turn(row.input_toks, row.output_toks)
        sessions.append(TraceSession(row.seconds, str(len(sessions)), (one,)))
    return ordered(1.0, sessions, numbers)


def _table(text: str, path: str) -> Trace:
    """Read CSV: cells may be quoted, and have blanks around them; blank lines are skipped."""
    reader = csv.reader(io.StringIO(text, newline=""), skipinitialspace=True)
    names: list[str] = []
    rows: list[tuple[int, dict[str, str]]] = []
    for row in reader:
        cells = [cell.strip() for cell in row]
        if not any(cells):
            continue
        if names:
            rows.append((reader.line_num, dict(zip(names, cells, strict=False))))
        else:
            names = cells
    if not rows:
        raise ConfigError(f"trace: {path} has no requests")
    if "TIMESTAMP" in names:
        return _rows(rows, ("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _since_first(), path)
    if "Request tokens" in names:
        columns = ("Timestamp", "Request tokens", "Response tokens")
        return _rows(rows, columns, float, path, failed=0)
    if "arrived_at" in names:
        columns = ("arrived_at", "num_prefill_tokens", "num_decode_tokens")
        return _rows(rows, columns, float, path)
    raise ConfigError(f"trace: {path} has columns {', '.join(names) or 'none'}, of no known trace")


def _since_first() -> Callable[[str], float]:
    """Return a reader of Azure's times, in seconds from the first one read."""
    first: list[datetime] = []

    def read(text: str) -> float:
        at = _time(text)
        if not first:
            first.append(at)
        return (at - first[0]).total_seconds()

    return read


def _time(text: str) -> datetime:
    """Return a time as ISO 8601 writes it, any digits of a second; without an offset it is UTC."""
    zoned = re.sub(r" ?(?:Z|z|UTC)$", "+00:00", re.sub(r" (?=[+-]\d\d)", "", text))
    try:
        if ":" not in text:
            raise ValueError("a date alone")
        at = datetime.fromisoformat(zoned)
    except ValueError:
        raise ValueError(
            "it is no time like 2023-11-16 18:15:46.68, with an offset or without"
        ) from None
    return at if at.tzinfo else at.replace(tzinfo=UTC)


def _rows(
    rows: Sequence[tuple[int, dict[str, str]]], columns: tuple[str, str, str],
    read: Callable[[str], float], path: str, failed: int | None = None,
) -> Trace:  # fmt: skip
    """Return the numbered rows of a table, read from its columns of times, inputs and outputs."""
    time, input_, output = columns
    sessions: list[TraceSession] = []
    numbers: list[int] = []
    for number, row in rows:
        with _line(number, path):
            tokens = _cell(row, output, _whole)
            if tokens == failed:
                continue
            one = turn(_cell(row, input_, _whole), tokens)
            sessions.append(TraceSession(_cell(row, time, read), str(len(sessions)), (one,)))
        numbers.append(number)
    return ordered(1.0, sessions, numbers)


def _whole(text: str) -> int:
    """Return a whole number, which may be written as a float (`374.0`)."""
    try:
        return int(text)
    except ValueError:
        number = float(text)
    if not number.is_integer():
        raise ValueError("it is no whole number")
    return int(number)


def _cell(row: Mapping[str, str], column: str, read: Callable[[str], T]) -> T:
    """Read a column of a row; raises ValueError if it is missing or malformed."""
    text = row.get(column)
    if text is None:
        raise ValueError(f"it has no {column}; is the file cut off?")
    try:
        return read(text)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{column} is {text!r}: {error}") from error


@contextmanager
def _line(number: int, path: str, what: str = "line") -> Iterator[None]:
    """Add the line number to errors raised within."""
    try:
        yield
    except (ValueError, TypeError, OverflowError) as error:
        raise ConfigError(f"trace: {what} {number} of {path}: {error}") from error


def _agents(texts: Iterable[str], path: str) -> Trace:
    sessions, sizes = [], set()
    for text in texts:
        whole = json.loads(text)
        known = whole if isinstance(whole, dict) else {}
        lacks = [name for name in _SESSION if name not in known]
        if lacks:
            raise ConfigError(f"trace: {path} is no agent session: JSON without {', '.join(lacks)}")
        sizes.add(_size(whole["block_size"], path))
        name = str(whole["id"])
        turns = tuple(_agent_turns(whole["requests"], f"{path}, session {name}"))
        if turns:
            sessions.append(TraceSession(0.0, name, turns, name=name))
    if not sessions:
        raise ConfigError(f"trace: {path} holds no session")
    if len(sizes) != 1:
        raise ConfigError(f"trace: {path} mixes block sizes {sorted(sizes)}; give one at a time")
    return ordered(sizes.pop(), sessions)


def _size(match: Any, path: str) -> int:
    if not isinstance(match, int) or match < 1:
        raise ConfigError(f"trace: block_size of {path} is {match!r}; it must be tokens, from 1 on")
    return match


def _agent_turns(rows: Sequence[dict[str, Any]], where: str) -> Iterator[Turn]:
    """The session's own requests; subagents, which are nested, are left out."""
    for number, row in enumerate(rows, 1):
        if "in" in row and "out" in row:
            with _line(number, where, "request"):
                one = turn(row["in"], row["out"], row["hash_ids"], row.get("think_time") or 0.0)
            yield one
