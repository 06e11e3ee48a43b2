"""Loads of benchmarks/live/routers.py: whole conversations, and text that is counted in tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from benchmarks.live.routers import LOADS, Run, pooled, sample, vocabulary
from pigou.workload.trace import Trace, TraceSession, Turn
from tools.make_random_checkpoint import Shape, write_checkpoint

BLOCK = 512.0


def conversations(count: int) -> Trace:
    """Conversations of three turns each behind one system prompt, by turns in time."""
    sessions = []
    for turn in range(3):
        for number in range(count):
            blocks = (0, *range(10 * number + 1, 10 * number + 2 + turn))
            turns = (Turn(int(BLOCK) * len(blocks), 320, blocks),)
            sessions.append(TraceSession(float(turn * count + number), "trace", turns))
    return Trace(BLOCK, tuple(sessions))


def test_a_conversation_is_taken_whole_and_in_its_order() -> None:
    found = sample(LOADS["conversation"], conversations(200), 1, 30, 20.0)
    turns: dict[int, list[int]] = {}
    for session in found.sessions:
        turns.setdefault(session.turns[0].blocks[1], []).append(len(session.turns[0].blocks))
    assert all(lengths == [2, 3, 4] for lengths in turns.values())
    assert found.request_count == 30
    starts = [session.start for session in found.sessions]
    assert starts == sorted(starts)
    assert (starts[0], starts[-1]) == (0.0, 20.0)


def test_a_seed_gives_one_sample_and_another_seed_another() -> None:
    load, trace = LOADS["conversation"], conversations(200)
    assert sample(load, trace, 1, 30, 20.0) == sample(load, trace, 1, 30, 20.0)
    assert sample(load, trace, 1, 30, 20.0) != sample(load, trace, 2, 30, 20.0)


def test_a_prompt_of_words_has_as_many_tokens_as_the_trace_says(tmp_path: Path) -> None:
    write_checkpoint(
        tmp_path, Shape(hidden=64, layers=1, heads=2, kv_heads=1, ffn=64), "float32", 0
    )
    words = vocabulary(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    trace = sample(LOADS["conversation"], conversations(200), 1, 9, 20.0)
    for session in trace.sessions:
        turn = session.turns[0]
        text = "".join(map(str, trace.prompt(session, turn, words)))  # type: ignore[arg-type]
        assert len(tokenizer.encode(text).ids) == turn.input


def test_rounds_are_pooled_by_request_and_hits_by_token() -> None:
    runs = [
        Run("toll", 0, 100.0, 50.0, 1.0, 2.0, 10.0, 0, [1.0] * 99, [3.0]),
        Run("toll", 1, 300.0, 290.0, 1.0, 2.0, 10.0, 1, [100.0], [5.0]),
    ]
    figures = pooled(runs).figures()
    assert figures["hits %"] == pytest.approx(85.0)
    assert figures["TTFT mean"] == pytest.approx(1.99)
    assert (figures["P50"], figures["errors"], figures["CPU s"]) == (1.0, 1, 2.0)
