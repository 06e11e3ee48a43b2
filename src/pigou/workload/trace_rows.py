"""Rows of traces in JSON lines: Pigou's own, which any trace can be written as, and others'."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import msgspec

from pigou.config import ConfigError
from pigou.workload.mooncake import block_tokens
from pigou.workload.trace import Trace, TraceSession, Turn, ordered, turn

#: Tokens in a block where rows have blocks and do not say.
_BLOCK = 16.0


class TraceRow(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True
):
    """A request of Pigou's own trace format, one a line."""

    input: int  # tokens of the prompt
    output: int  # tokens generated
    arrival_s: float | None = None  # when it is sent, in seconds
    # in place of `arrival_s`: seconds from the end of the request before it of the same `session`
    # (closed loop).
    think_s: float | None = None
    # of the prompt's blocks, the last of which may be filled in part; equal ids are equal blocks,
    # in the whole file.
    hash_ids: list[int] = []
    # tokens in a block, the same in all rows; left out, 16 or what all rows fit.
    block: float | None = None
    tenant: str | int = ""
    session: str | int = ""  # name of the conversation that it belongs to


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
    """Return the trace of its rows; `numbers` are their lines in the file, by default from 1 on.

    A row with `arrival_s` begins a session; one with `think_s` goes on with that of its name.
    """
    block = _block(rows, block)
    opened: list[_Open] = []
    last: dict[str, _Open] = {}
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
    """Return the tokens in a block: those that rows say, or that all rows fit."""
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
    """Yield a trace as rows, in the order of its sessions.

    Block ids are numbered by first use. Sessions of several turns are named where they are not:
    `session-0` and so on.
    """
    trace.check_timed("arrival_s of each session must be known")
    ids: dict[tuple[str, int], int] = {}
    taken = {session.name for session in trace.sessions}
    names = (name for n in count() if (name := f"session-{n}") not in taken)
    for session in trace.sessions:
        name = session.name or (next(names) if len(session.turns) > 1 else "")
        for index, turn_ in enumerate(session.turns):
            yield TraceRow(
                arrival_s=None if index else session.start,
                think_s=turn_.think if index else None,
                input=turn_.input,
                output=turn_.output,
                hash_ids=[ids.setdefault((session.scope, b), len(ids)) for b in turn_.blocks],
                block=_short(trace.block) if turn_.blocks else None,
                tenant=session.tenant,
                session=name,
            )


def _short(number: float) -> float:
    return int(number) if number == int(number) else number
