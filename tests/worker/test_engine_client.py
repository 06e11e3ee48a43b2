"""Laws of a request's sequences that wait outside of the engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from pigou.worker.engine_thread.commands import Add
from pigou.worker.engine_thread.engine_client import WaitingSequences


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
