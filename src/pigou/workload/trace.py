"""Recorded traces: sessions of turns, with the blocks of each prompt where they were recorded."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

import numpy as np
from numpy.typing import NDArray

from pigou.config import ConfigError
from pigou.sim.arrival_rate import MAX_SECONDS
from pigou.sim.workload import MAX_TOKENS

#: Block ids are below.
_IDS = 2**63


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session."""

    input: int  # tokens of the prompt, at least 1
    output: int  # tokens generated, at least 1
    # ids of the prompt's blocks, the last of which may be filled in part; equal ids are equal
    # blocks within their scope. Empty where the trace has none.
    blocks: tuple[int, ...] = ()
    think: float = 0.0  # seconds from the end of the turn before (closed loop)


@dataclass(frozen=True, slots=True)
class TraceSession:
    """Turns in sequence: each is sent after the last has ended."""

    start: float  # start of the first turn, in seconds from the trace's beginning
    scope: str  # namespace of block ids; sessions of one scope share blocks
    turns: tuple[Turn, ...]  # at least one
    tenant: str = ""  # empty where the trace does not say
    # name in the trace; empty if it gives none. Turns recorded with their own arrivals are sessions
    # with one name.
    name: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """Sessions in the order of their starts; `block` is the tokens in a block, above 0."""

    block: float
    sessions: tuple[TraceSession, ...]
    timed: bool = True  # whether the sessions' starts were recorded

    @property
    def request_count(self) -> int:
        """Requests of all sessions."""
        return sum(len(session.turns) for session in self.sessions)

    def check_timed(self, remedy: str) -> None:
        """Refuse a trace whose sessions have no times."""
        if not self.timed:
            raise ConfigError(f"trace: its rows have no timestamp; {remedy}")

    def scaled(self, tokens: float = 1.0, speed: float = 1.0) -> Trace:
        """Return the trace with lengths (and blocks) times `tokens`, and times by `speed`."""
        self._check_scale(tokens, speed)

        def turn(old: Turn) -> Turn:
            return replace(
                old,
                input=max(1, round(old.input * tokens)),
                output=max(1, round(old.output * tokens)),
                think=old.think / speed,
            )

        sessions = [
            replace(session, start=session.start / speed, turns=tuple(map(turn, session.turns)))
            for session in self.sessions
        ]
        return replace(self, block=self.block * tokens, sessions=tuple(sessions))

    def _check_scale(self, tokens: float, speed: float) -> None:
        turns = [turn for session in self.sessions for turn in session.turns]
        max_length = max((max(entry.input, entry.output) for entry in turns), default=0)
        if max_length * tokens > MAX_TOKENS:
            raise ConfigError(
                f"trace: scale is {tokens:g}, and {max_length} tokens times that are over "
                f"{MAX_TOKENS}; lower it"
            )
        times_s = [entry.think for entry in turns] + [entry.start for entry in self.sessions]
        wait = max(times_s, default=0.0)
        if wait > MAX_SECONDS * speed:
            raise ConfigError(
                f"trace: speed is {speed:g}, and {wait:g} s at that speed are over {MAX_SECONDS} "
                "(a year); raise it"
            )

    def fitting(self, max_tokens: int) -> Trace:
        """Return the trace; each session ends before its first turn of over `max_tokens` tokens."""
        sessions = []
        for session in self.sessions:
            turns: list[Turn] = []
            for turn in session.turns:
                if turn.input + turn.output > max_tokens:
                    break
                turns.append(turn)
            if turns:
                sessions.append(replace(session, turns=tuple(turns)))
        return replace(self, sessions=tuple(sessions))

    def prompt(self, session: TraceSession, turn: Turn, vocabulary: Sequence[int]) -> list[int]:
        """Return token ids of a turn's prompt, equal for equal blocks of a scope."""
        if not turn.blocks:
            return _tokens(f"{session.scope}/{session.start}/{turn}", turn.input, vocabulary)
        token_ids: list[int] = []
        for number, block in enumerate(turn.blocks):
            # Scaled blocks need not have whole lengths: their edges are rounded.
            size = round((number + 1) * self.block) - round(number * self.block)
            token_ids += _tokens(f"{session.scope}/{block}", size, vocabulary)
        if len(token_ids) < turn.input:
            rest = turn.input - len(token_ids)
            token_ids += _tokens(f"{session.scope}/{turn.blocks[-1]}/rest", rest, vocabulary)
        return token_ids[: turn.input]


def _tokens(name: str, count: int, vocabulary: Sequence[int]) -> list[int]:
    seed = np.frombuffer(name.encode().ljust(8, b"\0"), dtype=np.uint8)
    drawn: NDArray[np.int64] = np.random.default_rng(seed).integers(len(vocabulary), size=count)
    return [vocabulary[index] for index in drawn.tolist()]


def turn(input_: int, output: int, blocks: Sequence[int] = (), think: float = 0.0) -> Turn:
    """Return a turn of at least one token each; raises ValueError for impossible values."""
    counts = int(input_), int(output)
    for name, tokens in zip(("input", "output"), counts, strict=True):
        if not 0 <= tokens <= MAX_TOKENS:
            raise ValueError(f"{name} is {tokens} tokens; it must be 0 to {MAX_TOKENS}")
    think = float(think)
    if not 0 <= think <= MAX_SECONDS:
        raise ValueError(f"think time is {think} s; it must be 0 to {MAX_SECONDS} (a year)")
    ids = tuple(blocks)
    if ids and not (min(ids) >= -_IDS and max(ids) < _IDS):
        raise ValueError("hash_ids has one that is no integer of 64 bits; number them anew")
    return Turn(max(1, counts[0]), max(1, counts[1]), ids, think)


def ordered(block: float, sessions: Sequence[TraceSession], rows: Sequence[int] = ()) -> Trace:
    """Return a trace whose sessions begin in order, the first at 0; `rows` are their lines."""
    if not sessions:
        raise ConfigError("trace: it has no requests")
    first = min(
        (session.start for session in sessions if math.isfinite(session.start)), default=0.0
    )
    for number, session in zip(rows or count(1), sessions, strict=False):
        if not session.start - first <= MAX_SECONDS:  # a start that is no number is refused, too
            raise ConfigError(
                f"trace: line {number} starts {session.start - first} s after the first; it "
                f"must be at most {MAX_SECONDS} (a year)"
            )
    moved = [replace(session, start=session.start - first) for session in sessions]
    return Trace(float(block), tuple(sorted(moved, key=lambda session: session.start)))


def window(trace: Trace, begin: float, end: float) -> Trace:
    """Return the sessions starting in [begin, end) seconds, moved to 0."""
    sessions = [session for session in trace.sessions if begin <= session.start < end]
    if not sessions:
        last = trace.sessions[-1].start
        raise ConfigError(f"no session starts in [{begin:g}, {end:g}); the last does at {last:g} s")
    return ordered(trace.block, sessions)


def some(trace: Trace, sessions: int, rng: np.random.Generator) -> Trace:
    """Return a random sample of sessions, at their own times."""
    if not 1 <= sessions <= len(trace.sessions):
        raise ConfigError(f"--sessions is {sessions}; it must be in [1, {len(trace.sessions)}]")
    chosen = np.sort(rng.choice(len(trace.sessions), sessions, replace=False))
    return replace(trace, sessions=tuple(trace.sessions[i] for i in chosen.tolist()))


@dataclass(frozen=True, slots=True)
class Sharing:
    """Blocks of a trace."""

    references: int  # blocks of all prompts
    distinct: int  # different ones

    @property
    def reuse(self) -> float:
        """Share of block references seen before."""
        return 1.0 - self.distinct / self.references if self.references else 0.0


def turns(trace: Trace) -> Iterator[tuple[str, Turn]]:
    """Yield scope and turn of each request in the order of their times; serving takes none."""
    timed = []
    for number, session in enumerate(trace.sessions):
        at = session.start
        for index, turn in enumerate(session.turns):
            at += turn.think if index else 0.0
            timed.append((at, number, index, session.scope, turn))
    for *_, scope, turn in sorted(timed, key=lambda entry: entry[:3]):
        yield scope, turn


def sharing(trace: Trace) -> Sharing:
    """Count a trace's blocks."""
    seen: set[tuple[str, int]] = set()
    references = 0
    for scope, turn in turns(trace):
        references += len(turn.blocks)
        seen.update((scope, block) for block in turn.blocks)
    return Sharing(references, len(seen))


def hit_ratio(trace: Trace, tokens: float) -> float:
    """Return the best prompt hit ratio of one shared LRU cache; answers' blocks do not count."""
    room = tokens / trace.block
    cache: OrderedDict[tuple[str, int], None] = OrderedDict()
    hit = prompt_tokens = 0.0
    for scope, turn in turns(trace):
        names = [(scope, block) for block in turn.blocks]
        lead = next((i for i, name in enumerate(names) if name not in cache), len(names))
        hit += min(lead * trace.block, turn.input)
        prompt_tokens += turn.input
        for name in reversed(names):  # a chain's tail goes before its root
            cache[name] = None
            cache.move_to_end(name)
        while len(cache) > room:
            cache.popitem(last=False)
    return hit / prompt_tokens if prompt_tokens else 0.0
