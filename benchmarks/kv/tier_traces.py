"""Traces as the tiers see them: blocks of prompts and answers, in the order of time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

import numpy as np

from pigou.kv.block import ROOT, Block
from pigou.request import SECOND
from pigou.workload.trace import Trace, TraceSession, Turn
from pigou.workload.trace_formats import read_trace

#: Mean gap between random starts of sessions without recorded ones, in seconds.
APART_S = 20.0
#: Seconds for each token of an answer, where the trace is a closed loop.
TOKEN_S = 0.02


@dataclass(slots=True)
class Event:
    """A prompt that arrives (`asks`), or an answer that has ended, with its whole chain."""

    at: int
    asks: bool
    blocks: list[Block]
    keys: list[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.keys = [block.key for block in self.blocks]


@dataclass(frozen=True)
class Replay:
    """Events in the order of time, all at different times.

    `footprint` counts different blocks, `accesses` those of all prompts; `tokens` is a block's.
    """

    name: str
    tokens: int
    events: list[Event]
    footprint: int
    accesses: int


class Chains:
    """Blocks of one byte each, equal for equal ids after equal blocks."""

    def __init__(self) -> None:
        self._known: dict[tuple[bytes, object], Block] = {}

    def __len__(self) -> int:
        return len(self._known)

    def of(self, ids: Sequence[object], scope: bytes = ROOT) -> list[Block]:
        """The blocks of a prompt; those of another scope are others."""
        found = []
        parent = ROOT
        for depth, each in enumerate(ids):
            place = (parent or scope, each)
            block = self._known.get(place)
            if block is None:
                key = blake2b(repr(place).encode(), digest_size=16).digest()
                block = self._known[place] = Block(key, parent, depth, 1)
            found.append(block)
            parent = block.key
        return found


def mooncake(path: Path) -> Replay:
    """Kimi's conversations: all blocks of prompts, at their arrival; answers are not recorded."""
    trace = read_trace(path)
    chains = Chains()
    rows = [(each.start, True, chains.of(each.turns[0].blocks)) for each in trace.sessions]
    return _replay("mooncake conversation", int(trace.block), rows, chains)


def agents(path: Path, group: int = 8, sessions: int | None = None, seed: int = 0) -> Replay:
    """Agents' sessions in blocks of `group` recorded ones, with the blocks of their answers.

    A session begins at random (`APART_S`), and its turns follow one another: the recorded think
    time after the answer, which takes `TOKEN_S` for each token. What a turn produced is known
    from the next one's prompt.
    """
    trace = read_trace(path)
    generator = np.random.default_rng(seed)
    order = generator.permutation(len(trace.sessions))[:sessions]
    starts = generator.exponential(APART_S, len(order)).cumsum()
    chains = Chains()
    rows: list[Row] = []
    for start, place in zip(starts, order, strict=True):
        rows += _session(trace, trace.sessions[place], float(start), group, chains)
    size = int(trace.block) * group
    return _replay(f"agent sessions ({size})", size, rows, chains)


Row = tuple[float, bool, list[Block]]


def _session(
    trace: Trace, session: TraceSession, start: float, group: int, chains: Chains
) -> Iterator[Row]:
    size = int(trace.block) * group
    now = start
    scope = session.scope.encode()
    turns: list[Turn | None] = [*session.turns[1:], None]
    for turn, after in zip(session.turns, turns, strict=True):
        now += turn.think
        yield now, True, chains.of(_grouped(turn.blocks, group), scope)
        now += TOKEN_S * turn.output
        full = turn.input // int(trace.block)
        if after is not None and after.blocks[:full] == turn.blocks[:full]:
            known = _grouped(after.blocks, group)[: (turn.input + turn.output) // size]
            yield now, False, chains.of(known, scope)


def _grouped(ids: Sequence[int], group: int) -> list[tuple[int, ...]]:
    """Full groups; what is left over is no block."""
    return [tuple(ids[i : i + group]) for i in range(0, len(ids) - group + 1, group)]


def _replay(name: str, tokens: int, rows: list[Row], chains: Chains) -> Replay:
    """Sort by time; a nanosecond for each event tells those of one time apart."""
    rows.sort(key=lambda row: row[0])
    events = [Event(int(row[0] * SECOND) + i, *row[1:]) for i, row in enumerate(rows)]
    accesses = sum(len(each.blocks) for each in events if each.asks)
    return Replay(name, tokens, events, len(chains), accesses)
