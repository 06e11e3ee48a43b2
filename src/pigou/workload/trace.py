"""Recorded traces: sessions of turns, with the blocks of each prompt where they were recorded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count

import numpy as np
from numpy.typing import NDArray

from pigou.config import ConfigError
from pigou.sim.workload import MAX_SECONDS, MAX_TOKENS

#: Block ids are below.
_IDS = 2**63


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session.

    Attributes:
        input: tokens of the prompt, at least 1.
        output: tokens generated, at least 1.
        blocks: ids of the prompt's blocks, the last of which may be filled in part; equal ids are
            equal blocks within their scope. Empty where the trace has none.
        think: seconds from the end of the turn before (closed loop).
    """

    input: int
    output: int
    blocks: tuple[int, ...] = ()
    think: float = 0.0


@dataclass(frozen=True, slots=True)
class Session:
    """Turns that follow one another: each is sent when the one before has ended.

    Attributes:
        start: of the first turn, in seconds from the trace's beginning.
        scope: in which block ids mean the same; sessions of one scope share blocks.
        turns: at least one.
        tenant: whose it is; empty where the trace does not say.
        name: that the trace gives it; empty where it gives none. Sessions that were recorded turn
            by turn, each with its own arrival, are as many with one name.
    """

    start: float
    scope: str
    turns: tuple[Turn, ...]
    tenant: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """Sessions in the order of their starts; `block` is the tokens in a block, above 0."""

    block: float
    sessions: tuple[Session, ...]

    def scaled(self, tokens: float = 1.0, speed: float = 1.0) -> Trace:
        """Return the trace with all lengths times `tokens`, and all times by `speed`.

        Blocks shrink with the lengths, so that what was shared stays shared, in proportion.

        Raises:
            ConfigError: requests, or the times between them, would be too long.
        """
        self._check_scale(tokens, speed)

        def turn(each: Turn) -> Turn:
            return replace(
                each,
                input=max(1, round(each.input * tokens)),
                output=max(1, round(each.output * tokens)),
                think=each.think / speed,
            )

        sessions = [
            replace(each, start=each.start / speed, turns=tuple(map(turn, each.turns)))
            for each in self.sessions
        ]
        return Trace(self.block * tokens, tuple(sessions))

    def _check_scale(self, tokens: float, speed: float) -> None:
        turns = [turn for session in self.sessions for turn in session.turns]
        most = max((max(each.input, each.output) for each in turns), default=0)
        if most * tokens > MAX_TOKENS:
            raise ConfigError(
                f"trace: scale is {tokens:g}, and {most} tokens times that are over {MAX_TOKENS}; "
                "lower it"
            )
        waits = [each.think for each in turns] + [each.start for each in self.sessions]
        wait = max(waits, default=0.0)
        if wait > MAX_SECONDS * speed:
            raise ConfigError(
                f"trace: speed is {speed:g}, and {wait:g} s at that speed are over {MAX_SECONDS} "
                "(a year); raise it"
            )

    def fitting(self, most: int) -> Trace:
        """Return the trace without turns longer than `most` tokens, prompt and output.

        A session ends at its first such turn, as a client's would whose context is full.
        """
        kept = []
        for session in self.sessions:
            turns: list[Turn] = []
            for each in session.turns:
                if each.input + each.output > most:
                    break
                turns.append(each)
            if turns:
                kept.append(replace(session, turns=tuple(turns)))
        return replace(self, sessions=tuple(kept))

    def prompt(self, session: Session, turn: Turn, vocabulary: Sequence[int]) -> list[int]:
        """Return token ids for a turn's prompt, the same for the same blocks of the same scope.

        Without recorded blocks the prompt is one of the session's own, that no other shares.
        """
        if not turn.blocks:
            return _tokens(f"{session.scope}/{session.start}/{turn}", turn.input, vocabulary)
        found: list[int] = []
        for number, block in enumerate(turn.blocks):
            # Scaled blocks need not have whole lengths: their edges are rounded.
            size = round((number + 1) * self.block) - round(number * self.block)
            found += _tokens(f"{session.scope}/{block}", size, vocabulary)
        if len(found) < turn.input:
            rest = turn.input - len(found)
            found += _tokens(f"{session.scope}/{turn.blocks[-1]}/rest", rest, vocabulary)
        return found[: turn.input]


def _tokens(name: str, count: int, vocabulary: Sequence[int]) -> list[int]:
    seed = np.frombuffer(name.encode().ljust(8, b"\0"), dtype=np.uint8)
    drawn: NDArray[np.int64] = np.random.default_rng(seed).integers(len(vocabulary), size=count)
    return [vocabulary[place] for place in drawn.tolist()]


def turn(input_: int, output: int, blocks: Sequence[int] = (), think: float = 0.0) -> Turn:
    """Return a turn of at least one token each: where a trace has 0, 1 is taken.

    Raises:
        ValueError: a length or the think time is none that a request has, or a block id is none.
    """
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


def ordered(block: float, sessions: Sequence[Session], rows: Sequence[int] = ()) -> Trace:
    """Return a trace whose sessions begin in order, the first at 0.

    Args:
        block: tokens in a block.
        sessions: in any order.
        rows: line of each in its file; left out, they are one after another from line 1 on.

    Raises:
        ConfigError: there are none, or one begins at no time, or over a year after the first.
    """
    if not sessions:
        raise ConfigError("trace: it has no requests")
    first = min((each.start for each in sessions if math.isfinite(each.start)), default=0.0)
    for number, each in zip(rows or count(1), sessions, strict=False):
        if not each.start - first <= MAX_SECONDS:  # a start that is no number is refused, too
            raise ConfigError(
                f"trace: line {number} starts {each.start - first} s after the first; it must be "
                f"at most {MAX_SECONDS} (a year)"
            )
    moved = [replace(each, start=each.start - first) for each in sessions]
    return Trace(float(block), tuple(sorted(moved, key=lambda each: each.start)))
