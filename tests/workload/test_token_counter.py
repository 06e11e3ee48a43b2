from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lib.examples import examples

from pigou.workload.token_counter import BrokenStream, TokenCounter


def feed(tally: TokenCounter, now: int = 0, **chunk: Any) -> None:
    tally.feed(json.dumps(chunk).encode(), now)


def text(value: str = "x", finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": value, "finish_reason": finish, **more}]}


def usage(tokens: int, **more: Any) -> dict[str, Any]:
    return {"prompt_tokens": 5, "completion_tokens": tokens, "total_tokens": 5 + tokens, **more}


steps = st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 4)), min_size=1, max_size=30)


@settings(max_examples=examples(100))
@given(steps=steps, way=st.sampled_from(["usage", "token_ids"]))
def test_every_token_but_the_first_has_a_gap_and_the_gaps_add_up(
    steps: list[tuple[int, int]], way: str
) -> None:
    steps = [*steps, (5, 1)]
    tally, now, seen, first = TokenCounter(), 1000, 0, None
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
    tally = TokenCounter()
    for now, seen in [(10, 2), (40, 5), (45, 6)]:
        feed(tally, now, **text(), usage=usage(seen))
    tally.feed(b"[DONE]", 50)
    assert tally.close().gaps.tolist() == [0, 30, 0, 0, 5]


def test_without_counts_a_chunk_with_text_is_one_and_the_last_usage_decides_the_tokens() -> None:
    tally = TokenCounter()
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
        tally = TokenCounter()
        opening = {"index": 0, "delta": {"role": "assistant", "content": ""}}
        feed(tally, 1, choices=[opening], **extra)
        said = {"index": 0, "delta": {"content": "hi"}, "finish_reason": "stop"}
        feed(tally, 7, choices=[said], **({"usage": usage(1)} if extra else {}))
        stream = tally.close()
        assert (stream.first, stream.tokens) == (7, 1)


def test_usage_that_only_the_last_chunk_has_does_not_move_tokens_to_it() -> None:
    tally = TokenCounter()
    for now in (10, 20, 30):
        feed(tally, now, **text())
    feed(tally, 90, **text("", "stop"), usage=usage(3))
    assert tally.close().last == 30


@pytest.mark.parametrize("kind", ["reasoning_content", "reasoning", "tool_calls"])
def test_thoughts_and_calls_are_tokens_too(kind: str) -> None:
    tally = TokenCounter()
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
    with pytest.raises(BrokenStream) as broken:
        TokenCounter().feed(payload, 0)
    assert broken.value.failure.reason == reason


def test_a_stream_that_ends_before_its_end_is_broken() -> None:
    tally = TokenCounter()
    feed(tally, 0, **text())
    with pytest.raises(BrokenStream, match="broken stream"):
        tally.close()


def test_an_end_without_a_token_is_a_failure() -> None:
    tally = TokenCounter()
    feed(tally, 0, **text("", "stop"))
    tally.feed(b"[DONE]", 0)
    with pytest.raises(BrokenStream, match="no tokens"):
        tally.close()


def streamed(counts: list[int], told: Any, final: Any = None) -> Any:
    """A stream of chunks with so many tokens, 1 s apart; `told(seen, new, at)` is their usage."""
    tally, seen = TokenCounter(), 0
    for at, new in enumerate(counts):
        seen += new
        value = told(seen, new, at)
        more = {} if value is None else {"usage": usage(value)}
        feed(tally, at * 1000, **text("x" * new), **more)
    if final is not None:
        feed(tally, len(counts) * 1000, choices=[], usage=usage(final))
    tally.feed(b"[DONE]", 0)
    return tally.close()


ONES, SEVERAL = [1] * 308, [1, 3, 2, 4, 1, 1] * 20
ODD_USAGE = {
    "zero until the end": lambda seen, new, at: 0,
    "null until the end": lambda seen, new, at: None,
    "the total from the start": lambda seen, new, at: 308,
    "each chunk's own": lambda seen, new, at: new,
    "running": lambda seen, new, at: seen,
    "one for ever": lambda seen, new, at: 1,
    "counts down": lambda seen, new, at: 308 - seen,
}


@pytest.mark.parametrize("final", [308, None])
@pytest.mark.parametrize("told", ODD_USAGE.values(), ids=ODD_USAGE)
def test_gaps_are_those_of_the_chunks_whatever_usage_says(told: Any, final: int | None) -> None:
    stream = streamed(ONES, told, final)
    assert stream.tokens == 308
    assert stream.gaps.tolist() == [1000] * 307
    assert (stream.first, stream.last) == (0, 307_000)


def test_usage_that_tells_each_chunks_own_tokens_is_known_from_a_running_one() -> None:
    for told, way in ((ODD_USAGE["running"], "usage"),
                      (ODD_USAGE["each chunk's own"], "usage_per_chunk")):  # fmt: skip
        for final in (sum(SEVERAL), None):
            stream = streamed(SEVERAL, told, final)
            assert (stream.counted, stream.tokens) == (way, sum(SEVERAL))
            assert stream.chunks == len(SEVERAL)
            assert stream.gaps.sum() == stream.last


def test_a_usage_that_tells_nothing_until_the_end_gives_way_to_token_ids() -> None:
    tally = TokenCounter()
    for now in range(4):
        feed(tally, now, **text("ab", token_ids=[1, 2]), usage=usage(0))
    feed(tally, 9, choices=[], usage=usage(8))
    tally.feed(b"[DONE]", 9)
    stream = tally.close()
    assert (stream.counted, stream.tokens) == ("token_ids", 8)
    assert stream.gaps.tolist() == [0, 1, 0, 1, 0, 1, 0]


def test_a_zero_total_on_the_last_chunk_is_not_believed() -> None:
    tally = TokenCounter()
    for now in range(10):
        feed(tally, now, **text(finish="length" if now == 9 else None), usage=usage(0))
    tally.feed(b"[DONE]", 9)
    assert tally.close().tokens == 10


@pytest.mark.parametrize("payload", [b"", b'{"choices": null}', b'{"usage": {}}', b"{}",
                                     b'{"choices": [{"delta": null}], "usage": null}',
                                     b'{"choices": [], "usage": {"completion_tokens": 2.0}}',
                                     b'{"choices": [], "error": null}'])  # fmt: skip
def test_harmless_chunks_break_no_measurement(payload: bytes) -> None:
    tally = TokenCounter()
    for now in range(2):
        tally.feed(payload, now)
        feed(tally, now, **text())
    tally.feed(b"[DONE]", 3)
    assert tally.close().tokens == 2
