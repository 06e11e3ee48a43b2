from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pigou.workload.tally import Broken, Tally


def feed(tally: Tally, now: int = 0, **chunk: Any) -> None:
    tally.feed(json.dumps(chunk).encode(), now)


def text(value: str = "x", finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": value, "finish_reason": finish, **more}]}


def usage(tokens: int, **more: Any) -> dict[str, Any]:
    return {"prompt_tokens": 5, "completion_tokens": tokens, "total_tokens": 5 + tokens, **more}


steps = st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 4)), min_size=1, max_size=30)


@settings(max_examples=100, deadline=None)
@given(steps=steps, way=st.sampled_from(["usage", "token_ids"]))
def test_every_token_but_the_first_has_a_gap_and_the_gaps_add_up(
    steps: list[tuple[int, int]], way: str
) -> None:
    steps = [*steps, (5, 1)]
    tally, now, seen, first = Tally(), 1000, 0, None
    for wait, new in steps:
        now += wait
        seen += new
        first = now if first is None and new else first
        if way == "usage":
            feed(tally, now, **text("x" * new), usage=usage(seen))
        else:
            feed(tally, now, **text("x" * new, token_ids=[1] * new))
    feed(tally, now + 9, **text("", "length"), usage=usage(seen))
    stream = tally.close()
    assert (stream.tokens, stream.counted, stream.first, stream.last) == (seen, way, first, now)
    assert len(stream.gaps) == seen - 1
    assert stream.gaps.sum() == stream.last - stream.first
    assert stream.chunks == sum(new > 0 for _, new in steps)


def test_tokens_that_come_together_have_no_gap_between_them() -> None:
    tally = Tally()
    for now, seen in [(10, 2), (40, 5), (45, 6)]:
        feed(tally, now, **text(), usage=usage(seen))
    tally.feed(b"[DONE]", 50)
    assert tally.close().gaps.tolist() == [0, 30, 0, 0, 5]


def test_without_counts_a_chunk_with_text_is_one_and_the_last_usage_decides_the_tokens() -> None:
    tally = Tally()
    for now in (10, 20, 40):
        feed(tally, now, **text())
    feed(tally, 50, **text("", "stop"))
    feed(tally, 50, choices=[], usage=usage(9, prompt_tokens_details={"cached_tokens": 4}))
    stream = tally.close()
    assert (stream.counted, stream.tokens, stream.chunks) == ("chunks", 9, 3)
    assert stream.gaps.tolist() == [10, 20]
    assert (stream.prompt_tokens, stream.cached_tokens) == (5, 4)


def test_a_chunk_that_only_opens_a_chat_is_no_token() -> None:
    for extra in ({}, {"usage": usage(0)}):
        tally = Tally()
        opening = {"index": 0, "delta": {"role": "assistant", "content": ""}}
        feed(tally, 1, choices=[opening], **extra)
        said = {"index": 0, "delta": {"content": "hi"}, "finish_reason": "stop"}
        feed(tally, 7, choices=[said], **({"usage": usage(1)} if extra else {}))
        stream = tally.close()
        assert (stream.first, stream.tokens) == (7, 1)


def test_usage_that_only_the_last_chunk_has_does_not_move_tokens_to_it() -> None:
    tally = Tally()
    for now in (10, 20, 30):
        feed(tally, now, **text())
    feed(tally, 90, **text("", "stop"), usage=usage(3))
    assert tally.close().last == 30


@pytest.mark.parametrize("kind", ["reasoning_content", "reasoning", "tool_calls"])
def test_thoughts_and_calls_are_tokens_too(kind: str) -> None:
    tally = Tally()
    value: Any = [{"index": 0}] if kind == "tool_calls" else "hm"
    feed(tally, 3, choices=[{"index": 0, "delta": {kind: value}, "finish_reason": "stop"}])
    assert tally.close().first == 3


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b'{"error": {"message": "boom"}}', "error event"),
        (b'{"error": "boom"}', "error event"),
        (b'{"choices": [{"text": "x", "finish_reason": "abort"}]}', "aborted"),
        (b"{nope", "malformed chunk"),
        (b'{"choices": 3}', "malformed chunk"),
        (b'{"choices": [{"text": "\xff"}]}', "malformed chunk"),
    ],
)
def test_what_is_no_result_is_a_failure_with_its_reason(payload: bytes, reason: str) -> None:
    with pytest.raises(Broken) as broken:
        Tally().feed(payload, 0)
    assert broken.value.failure.reason == reason


def test_a_stream_that_ends_before_its_end_is_broken() -> None:
    tally = Tally()
    feed(tally, 0, **text())
    with pytest.raises(Broken, match="broken stream"):
        tally.close()


def test_an_end_without_a_token_is_a_failure() -> None:
    tally = Tally()
    feed(tally, 0, **text("", "stop"))
    tally.feed(b"[DONE]", 0)
    with pytest.raises(Broken, match="no tokens"):
        tally.close()
