"""Laws of a request's sequences that wait outside of the engine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pigou.request import SamplingParams
from pigou.text.tokenizer import Tokenizer
from pigou.wire.structured_output import ToolUse
from pigou.worker.engine_thread.commands import Add
from pigou.worker.engine_thread.engine_client import WaitingSequences
from pigou.worker.http.reply import Reply, ReplyOptions, ReplySequence
from pigou.worker.http.sequence_output import MessageStream, SequenceOutput, TextOptions, Tools


def add(name: str) -> Add:
    return cast(Add, SimpleNamespace(name=name))


@given(st.integers(1, 5), st.lists(st.integers(0, 3), max_size=60), st.data())
def test_no_more_of_one_reply_are_inside_than_may_be_and_each_gets_its_turn(
    most: int, replies: list[int], data: Any
) -> None:
    held, inside, went = WaitingSequences(most), dict.fromkeys(range(4), 0), 0
    for number, reply in enumerate(replies):
        if held.enters(reply, add(str(number))):
            inside[reply] += 1
            went += 1
        assert inside[reply] <= most
    assert len(held) + went == len(replies)
    while any(inside.values()):
        reply = data.draw(st.sampled_from([each for each, count in inside.items() if count]))
        inside[reply] -= 1
        if held.left(reply) is not None:
            inside[reply] += 1
            went += 1
        assert inside[reply] <= most
    assert (went, len(held)) == (len(replies), 0)
    assert not held._inside


def test_what_is_dropped_does_not_come_back() -> None:
    held = WaitingSequences(1)
    assert held.enters(1, add("a"))
    assert not held.enters(1, add("b"))
    assert [cast(Any, each).name for each in held.drop(1)] == ["b"]
    assert held.left(1) is None
    assert held.enters(1, add("c"))


@pytest.mark.parametrize("single", [False, True])
def test_a_request_ends_behind_the_only_call_that_its_client_wants(
    model_folder: Path, single: bool
) -> None:
    tokenizer = Tokenizer.load(model_folder)
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call> and so on, and so on'
    tokens = tokenizer.encode(text)
    choice = SequenceOutput(
        tokenizer, frozenset(), SamplingParams(max_tokens=999), TextOptions(), []
    )
    tools = Tools(ToolUse("auto", {"f": {}}), "hermes", single)
    message = MessageStream(tools, "key")
    sequence = ReplySequence("a", 0, [1], choice, 0, message=message)
    reply = Reply("a", 0, "m", ReplyOptions(chat=True))
    reply.add(sequence)
    taken = next((n for n, token in enumerate(tokens) if reply.take(sequence, token, None)), None)
    assert (choice.is_cut, reply.done) == (single, single)
    if single:
        assert taken is not None
        assert taken < len(tokens) / 2 + 5
        assert sequence.finish == "tool_calls"
    assert len(message.calls) == 1
