"""Laws of the relay: what the client gets does not depend on how a stream's bytes are cut."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pigou.gateway.call import Call
from pigou.gateway.relay import Relay
from pigou.wire.sse import DONE, frame

texts = st.text(max_size=6) | st.sampled_from(
    ['"token_ids":[1]', "\n\n", "data: x", "\\", '"error":{}', "]", "\r\n"]
)


@st.composite
def chunks(draw: st.DrawFn) -> dict[str, Any]:
    """One chunk amid a reply, of any kind that workers send."""
    chat = draw(st.booleans())
    text = draw(texts)
    choice: dict[str, Any] = {"index": 0, "logprobs": draw(st.none() | st.just({"tokens": [text]}))}
    choice |= {"delta": {"content": text}} if chat else {"text": text}
    choice["finish_reason"] = draw(st.sampled_from([None, None, None, "stop", "length"]))
    choice["token_ids"] = draw(st.none() | st.lists(st.integers(0, 2**31), max_size=3))
    body = {"id": "a", "created": 1, "model": "m", "choices": [choice]}
    kind = draw(st.sampled_from(["token"] * 6 + ["usage", "prompt", "dynamo", "two"]))
    if kind == "usage":
        body |= {"choices": [], "usage": {"prompt_tokens": 1}}
    elif kind == "prompt":
        choice["prompt_token_ids"] = [5, 6]
    elif kind == "dynamo":
        body["nvext"] = {"completion_token_ids": [9]}
    elif kind == "two":
        body["choices"] = [choice, choice | {"index": 1}]
    return body


def encode(body: dict[str, Any], spaced: bool) -> bytes:
    raw = msgspec.json.encode(body)
    return raw.replace(b'":', b'": ') if spaced else raw


def relayed(parts: list[bytes], stock: bool, wants_ids: bool) -> tuple[bytes, Relay]:
    relay = Relay(cast(Call, SimpleNamespace(single=True, wants_ids=wants_ids)))
    relay.begin(stock=stock, mapped=False)
    return b"".join(relay.feed(part) for part in parts), relay


@given(
    bodies=st.lists(chunks(), min_size=1, max_size=6),
    stock=st.booleans(),
    wants_ids=st.booleans(),
    spaced=st.booleans(),
    data=st.data(),
)
def test_a_stream_event_by_event_is_the_stream_at_once(
    bodies: list[dict[str, Any]],
    stock: bool,
    wants_ids: bool,
    spaced: bool,
    data: st.DataObject,
) -> None:
    events = [*(frame(encode(body, spaced)) for body in bodies), DONE]
    stream = b"".join(events)
    cut = data.draw(st.integers(0, len(stream)))
    whole, first = relayed([stream], stock, wants_ids)
    for parts in (events, [stream[:cut], stream[cut:]]):
        got, relay = relayed(parts, stock, wants_ids)
        assert got == whole
        assert relay.counted == first.counted
        assert relay.transcript == first.transcript
        assert relay.failed is None


@pytest.mark.parametrize("stock", [False, True])
@pytest.mark.parametrize(
    "bad",
    [
        b'data: {"choices":[{"token_ids":[1],"finish_reason":null}\n\n',
        b'data: {"choices":[{"token_ids":[1],"finish_reason":"abort"}]}\n\n',
        b'data: {"error":{"message":"no","code":500},"choices":[{"token_ids":[1]}]}\n\n',
        b'data: {"choices":[{"token_ids":["x"]}]}\n\n',
    ],
    ids=["cut", "abort", "error", "no-ids"],
)
def test_what_is_no_token_fails_the_attempt_and_reaches_no_client(bad: bytes, stock: bool) -> None:
    good = b'data: {"choices":[{"index":0,"text":"a","token_ids":[1],"finish_reason":null}]}\n\n'
    got, relay = relayed([good, good, bad], stock, wants_ids=True)
    assert got == good + good
    assert relay.failed is not None
    assert relay.transcript.tokens == [1, 1]
