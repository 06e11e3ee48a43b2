"""Laws of the relay: what the client gets does not depend on how a stream's bytes are cut."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given, settings
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


@st.composite
def alike(draw: st.DrawFn) -> list[bytes]:
    """Events of one stream: the same chunk with another text and id each time, mostly."""
    chat, compact = draw(st.booleans()), draw(st.integers(0, 9)) > 0
    extra = draw(st.sampled_from([{}, {"usage": None}, {"text": "x"}, {"token_ids": [7]}]))
    before = draw(st.sampled_from([{}, {"error": None}, {"prompt_token_ids": None}]))
    ascii_only = draw(st.booleans())
    events = []
    plain = st.sampled_from([" token", "", "é", "词"])
    for text in draw(st.lists(st.one_of(plain, plain, plain, texts), min_size=3, max_size=12)):
        ids = draw(st.sampled_from([[1234], [5], [6], [0], [7, 8], [], None, [10**9]]))
        choice = {"index": 0, **({"delta": {"content": text}} if chat else {"text": text})}
        choice |= {"logprobs": None, "finish_reason": None, **before, "token_ids": ids}
        body = {"id": "a", "created": 1, "model": "m", "choices": [choice], **extra}
        spaces = (",", ":") if compact else (", ", ": ")
        events.append(frame(json.dumps(body, ensure_ascii=ascii_only, separators=spaces).encode()))
    return [*events, DONE]


def cut(stream: bytes, places: set[int]) -> list[bytes]:
    ends = [0, *sorted(places), len(stream)]
    return [stream[a:b] for a, b in itertools.pairwise(ends)]


def until_failed(parts: list[bytes], stock: bool, wants_ids: bool) -> tuple[object, ...]:
    """What a client and the gateway know after these parts, or those before one that fails."""
    relay = Relay(cast(Call, SimpleNamespace(single=True, wants_ids=wants_ids)))
    relay.begin(stock=stock, mapped=False)
    got = b""
    for part in parts:
        got += relay.feed(part)
        if relay.failed is not None or relay.transcript.done:
            break
    return got, relay.counted, relay.transcript, type(relay.failed), str(relay.failed)


@settings(max_examples=300)
@given(events=alike(), stock=st.booleans(), wants_ids=st.booleans(), data=st.data())
def test_a_damaged_stream_is_the_same_however_it_is_cut(
    events: list[bytes], stock: bool, wants_ids: bool, data: st.DataObject
) -> None:
    if data.draw(st.booleans(), label="damage"):
        which = data.draw(st.integers(0, len(events) - 1))
        at = data.draw(st.integers(0, len(events[which]) - 1))
        with_ = data.draw(st.sampled_from([b"", b'"', b"\\", b"\n", b"\r", b"\x00", b"\xff", b"1"]))
        events[which] = events[which][:at] + with_ + events[which][at + 1 :]
    stream = b"".join(events)
    # In one piece, every chunk is parsed; event by event, most are told by the mould.
    whole = until_failed([stream], stock, wants_ids)
    assert until_failed(events, stock, wants_ids) == whole
    places = data.draw(st.sets(st.integers(1, len(stream) - 1), max_size=12), label="places")
    assert until_failed(cut(stream, places), stock, wants_ids) == whole


@pytest.mark.parametrize("stock", [False, True])
@pytest.mark.parametrize("key", ['"text":"%s"', '"delta":{"content":"%s"}'])
def test_tokens_that_come_alone_are_not_parsed(
    key: str, stock: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def event(text: str, token: int, finish: str = "null") -> bytes:
        shown = key % text
        body = f'{{"id":"a","choices":[{{"index":0,{shown},"finish_reason":{finish},"token_ids":'
        return frame(f"{body}[{token}]}}]}}".encode())

    relay = Relay(cast(Call, SimpleNamespace(single=True, wants_ids=True)))
    relay.begin(stock=stock, mapped=False)
    relay.feed(event(" a", 1))
    relay.feed(event(" b", 2))
    with monkeypatch.context() as patch:
        patch.setattr(relay, "_parse", None)
        for token in range(10, 30):
            sent = event(f" {token} é", token)
            assert relay.feed(sent) == sent
    assert relay.transcript.tokens == [1, 2, *range(10, 30)]
    assert relay.transcript.shown == (22 if stock else 1)
    relay.feed(event("", 3, '"stop"'))
    assert relay.transcript.finish == "stop"


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
