"""Traces in Mooncake's JSON lines, as Mooncake, Bailian, AIPerf, GenAI-Perf and Dynamo write.

Rows of a session may have a delay for an arrival. No row has the tokens of a block: it is inferred
where all rows fit one size, else it must be named.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import msgspec

from pigou.config import ConfigError
from pigou.workload.trace import Trace, TraceSession, Turn, ordered, turn

#: Tokens of a block in Mooncake's own traces, and in Bailian's, where they fit.
MOONCAKE_BLOCK, BAILIAN_BLOCK = 512, 16
#: Seconds of a unit of time.
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
#: Range of this century in seconds since 1970.
_EPOCH_S = (1e9, 5e9)
#: Requests a second above which a trace's times are hardly in the unit that is assumed.
_MAX_RATE = 2000.0
#: Keys of texts in place of lengths.
_TEXTS = ("text_input", "input_text", "messages", "payload", "prompt")
#: Keys by which a row is recognised.
KEYS = frozenset(
    ("timestamp", "created_time", "input_length", "input_tokens", "output_length", "output_tokens",
     "delay", "delay_ms", *_TEXTS)
)  # fmt: skip
_ALIASES = {
    "input_tokens": "input_length", "output_tokens": "output_length",
    "created_time": "timestamp", "delay_ms": "delay",
}  # fmt: skip


class MooncakeRow(msgspec.Struct, frozen=True, kw_only=True):
    """A request; times are in milliseconds, in Bailian's traces in seconds."""

    input_length: int
    output_length: int
    timestamp: float | None = None
    delay: float | None = None  # ms after the session's last turn
    hash_ids: list[int] = []
    session_id: str | int | None = None
    chat_id: int | None = None  # Bailian's


def decode_row(line: bytes) -> MooncakeRow:
    """Decode a row, numbers also as floats or text; raises ValueError without lengths."""
    keys = msgspec.json.decode(line, type=dict[str, Any])
    keys = {_ALIASES.get(key, key): value for key, value in keys.items() if value is not None}
    for key in _TEXTS:
        if key in keys and "input_length" not in keys:
            raise ValueError(f"it has {key}, and no input_length; give the prompt's tokens")
    for key in ("input_length", "output_length"):
        if key not in keys:
            raise ValueError(f"it has no {key}; give it, in tokens, in every row")
    return msgspec.convert(keys, MooncakeRow, strict=False)


def to_trace(
    rows: Sequence[MooncakeRow], numbers: Sequence[int], path: str,
    block: float = 0.0, unit: str = "", name_block: int = 0,
) -> Trace:  # fmt: skip
    """Return the trace of rows that all have block ids.

    `block` (or `name_block`, from the file name) is tokens per block, 0 for what fits; `unit` is of
    timestamps.
    """
    bailian = any(row.chat_id is not None for row in rows)
    pairs = [(row.input_length, len(row.hash_ids)) for row in rows if row.hash_ids]
    default = name_block or (BAILIAN_BLOCK if bailian else MOONCAKE_BLOCK)
    scale = _seconds([row.timestamp for row in rows], unit, "s" if bailian else "ms", path)
    sessions = _sessions(rows, numbers, scale, path)
    size = block_tokens(pairs, block or name_block, default, f"trace: {path}")
    timed = any(row.timestamp is not None for row in rows)
    return replace(
        ordered(size, [one for one, _ in sessions], [n for _, n in sessions]), timed=timed
    )


def block_tokens(
    pairs: Iterable[tuple[int, int]], given: float, default: float, where: str
) -> float:
    """Return tokens per block:

    `given`, `default`, or the one size that fits all (tokens, blocks).
    """
    distinct = sorted({(tokens, count) for tokens, count in pairs if tokens > 0})
    if given:
        wrong = [pair for pair in distinct if not _fits(*pair, given)]
        if any((count - 1) * given >= tokens for tokens, count in wrong) or (
            distinct and len(wrong) == len(distinct)
        ):
            tokens, count = wrong[0]
            raise ConfigError(
                f"{where}: a block is {given:g} tokens, and a prompt of {tokens} has {count} "
                f"hash_ids; name the size by block, {tokens / count:.0f} or so"
            )
        return given
    if all(_fits(*pair, default) for pair in distinct):
        return default
    low = max(tokens / (count + 1) for tokens, count in distinct)
    high = min((tokens / (count - 1) for tokens, count in distinct if count > 1), default=math.inf)
    sizes = range(max(1, math.floor(low)), math.ceil(min(high, 1 << 17)) + 1)
    fitting = [size for size in sizes if all(_fits(*pair, size) for pair in distinct)]
    whole = [size for size in fitting if size & (size - 1) == 0]
    if len(whole or fitting) == 1:
        return float((whole or fitting)[0])
    tokens, count = next(pair for pair in distinct if not _fits(*pair, default))
    candidates = (
        f"{len(fitting)} sizes fit, from {fitting[0]} to {fitting[-1]}" if fitting else "none fits"
    )
    raise ConfigError(
        f"{where}: a prompt of {tokens} tokens has {count} hash_ids, which blocks of {default:g} "
        f"do not give, and of other sizes {candidates} all rows; name the size by block"
    )


def _fits(tokens: int, count: int, size: float) -> bool:
    """Whether a prompt has `count` blocks; the last one may be partial or left out."""
    return count in (math.ceil(tokens / size), math.floor(tokens / size))


def _seconds(stamps: Sequence[float | None], unit: str, default: str, path: str) -> float:
    if unit and unit not in UNITS:
        raise ConfigError(f"trace: unit is {unit!r}; it must be one of {', '.join(UNITS)}")
    times = [time for time in stamps if time is not None]
    if unit or not times:
        return UNITS[unit or default]
    first, last = min(times), max(times)
    for seconds in UNITS.values():
        if _EPOCH_S[0] <= first * seconds <= last * seconds <= _EPOCH_S[1]:
            return seconds
    span = (last - first) * UNITS[default]
    if len(times) > 2 and 0 < span * _MAX_RATE < len(times) - 1:
        raise ConfigError(
            f"trace: {path} has {len(times)} requests within {span:g} s if its times are in "
            f"{default}; name the unit: unit=s, unit=ms, ..."
        )
    return UNITS[default]


def _sessions(
    rows: Sequence[MooncakeRow], numbers: Sequence[int], scale: float, path: str
) -> list[tuple[TraceSession, int]]:
    """Return sessions, and the lines that they begin in."""
    untimed = all(row.timestamp is None for row in rows)
    begun: list[tuple[str, float, int, list[Turn]]] = []
    last: dict[str, list[Turn]] = {}
    for number, row in zip(numbers, rows, strict=True):
        named = row.session_id if row.session_id is not None else row.chat_id
        name = "" if named is None else str(named)
        try:
            if row.timestamp is not None and row.delay is not None:
                raise ValueError("it has timestamp and delay; give one")
            think = (row.delay or 0.0) * scale
            one = turn(row.input_length, row.output_length, row.hash_ids, think)
            if row.timestamp is None and row.session_id is not None and name in last:
                last[name].append(one)
                continue
            if row.delay and not untimed:
                raise ValueError(f"it has delay, and session {name!r} has no turn before it")
            if row.timestamp is None and not untimed:
                raise ValueError("it has no timestamp, and other rows have; give all of them one")
        except (ValueError, TypeError, OverflowError) as error:
            raise ConfigError(f"trace: line {number} of {path}: {error}") from error
        last[name] = [one]
        begun.append((name, (row.timestamp or 0.0) * scale, number, last[name]))
    _add_history([turns for *_, turns in begun], path)
    made = []
    for name, start, number, turns in begun:
        scope = "trace" if turns[0].blocks else f"row {number}"
        made.append((TraceSession(start, scope, tuple(turns), name=name), number))
    return made


def _add_history(sessions: Sequence[list[Turn]], path: str) -> None:
    """Make prompts whole where rows without blocks hold the new text of their turn alone."""
    steps = [
        (before, after)
        for turns in sessions
        for before, after in pairwise(turns)
        if not after.blocks
    ]
    shorter = sum(after.input < before.input + before.output for before, after in steps)
    if not shorter:
        return
    if shorter < len(steps):
        raise ConfigError(
            f"trace: {path} has sessions whose prompts hold what was said before, and others "
            "whose do not; make input_length the whole prompt of each turn"
        )
    for turns in sessions:
        for at in range(1, len(turns)):
            before, after = turns[at - 1], turns[at]
            if not after.blocks:
                turns[at] = replace(after, input=before.input + before.output + after.input)
