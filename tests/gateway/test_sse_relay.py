"""Laws of the relay: what the client gets does not depend on how a stream's bytes are cut."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lib.examples import examples

from pigou.gateway.proxy.relay import Relay
from pigou.gateway.request import BodyFields, GatewayRun, ParsedRequest
from pigou.wire.sse import DONE, frame

texts = st.text(max_size=6) | st.sampled_from(
    ['"token_ids":[1]', "\n\n", "data: x", "\\", '"error":{}', "]", "\r\n"]
)


def call(wants_ids: bool = True, **changes: Any) -> GatewayRun:
    fields = {
        "chat": False,
        "stream": True,
        "body": {},
        "prompt_tokens": 1,
        "max_tokens": 9,
    } | changes
    return GatewayRun.of(ParsedRequest(id="a", wire_id="a", wants_ids=wants_ids, **fields))


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
    relay = Relay(call(wants_ids))
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
        assert relay.state == first.state
        assert relay.failed is None


#: What may surround text and ids of a choice, alike in all chunks of a stream.
SHAPES = [
    b'"text":"%b","logprobs":null,"finish_reason":null,"token_ids":[%b]%b',
    b'"delta":{"content":"%b"},"finish_reason":null,"token_ids":[%b]%b',
    b'"delta":{"content":"%b","token_ids":[3]},"token_ids":[%b]%b',
    b'"prompt_token_ids":[5],"text":"%b","token_ids":[%b]%b',
    b'"content":"x","text":"%b","token_ids":[%b]%b',
    b'"reason":{"text":"%b"},"token_ids":[%b]%b',
    b'"reason":{"text":"%b"},"delta":{"content":"y"},"token_ids":[%b]%b',
    b'"\\u0074oken_ids":[5],"text":"%b","x":{"token_ids":[%b]}%b',
    b'"token_ids": [5],"text":"%b","x":{"token_ids":[%b]}%b',
]
TEXTS = [b" a", b"", "\u8bcd".encode(), b'\\"', b"\\u00e9", b'"', b"\\", b"\x01", b"\n", b"\r",
         b"\xff", b'","token_ids":[1],"x":"', b"\n\n", b'","error":{"a":"m"},"x":"']  # fmt: skip
IDS = [b"1234", b"5", b"0", b"01", b"1_0", b" 1", b"+1", b"7,8", b"", b"9" * 10, b"x"]
TAILS = [b"}]}", b',"finish_reason":"stop"}]}', b',"finish_reason":"abort"}]}', b"}]", b"}]} ",
         b'}],"nvext":{"completion_token_ids":[9]}}', b'}],"usage":null}', b'},{"index":1}]}',
         b'}],"error":{"message":"no"}}']  # fmt: skip
HEADS = [b'"id":"aaa"', b'"id":"bbb"', b'"error":{}', b'"error":{"message":"no","code":400}']


@st.composite
def alike(draw: st.DrawFn) -> list[bytes]:
    """Events of one stream: the same chunk with another text and id each time, mostly."""
    shape = draw(st.sampled_from(SHAPES))
    usual = draw(st.sampled_from([HEADS[0], HEADS[0], b'"nvext":{"completion_token_ids":[9]}']))

    def event(head: bytes, text: bytes, ids: bytes, tail: bytes) -> bytes:
        return frame(b'{%b,"choices":[{"index":0,%b' % (head, shape % (text, ids, tail)))

    events = [event(usual, b" b", b"%d" % i, TAILS[0]) for i in range(1, 4)]
    for _ in range(draw(st.integers(1, 4))):
        parts = [usual, TEXTS[0], IDS[0], TAILS[0]]
        # One part is odd: what is odd in two ways would be found by either.
        odd = draw(st.integers(0, 3))
        parts[odd] = draw(st.sampled_from((HEADS, TEXTS, IDS, TAILS)[odd]))
        events.append(event(*parts))
    return [*events, DONE]


def cut(stream: bytes, places: set[int]) -> list[bytes]:
    ends = [0, *sorted(places), len(stream)]
    return [stream[a:b] for a, b in itertools.pairwise(ends)]


def until_failed(
    parts: list[bytes], stock: bool, wants_ids: bool, limit: int | None = None
) -> tuple[object, ...]:
    """What a client and the gateway know after these parts, or those before one that fails."""
    relay = Relay(call(wants_ids, fields=BodyFields(max_tokens=limit)))
    relay.begin(stock=stock, mapped=False)
    got = b""
    for part in parts:
        got += relay.feed(part)
        if relay.failed is not None or relay.state.done:
            break
    return got, relay.counted, relay.state, type(relay.failed), str(relay.failed)


@settings(max_examples=examples(1000))
@given(events=alike(), stock=st.booleans(), wants_ids=st.booleans(), data=st.data())
def test_what_is_almost_a_token_is_taken_as_if_it_were_parsed(
    events: list[bytes], stock: bool, wants_ids: bool, data: st.DataObject
) -> None:
    stream = b"".join(events)
    # In one piece, every chunk is parsed; event by event, most match the template.
    whole = until_failed([stream], stock, wants_ids)
    assert until_failed(events, stock, wants_ids) == whole
    places = data.draw(st.sets(st.integers(1, len(stream) - 1), max_size=12), label="places")
    assert until_failed(cut(stream, places), stock, wants_ids) == whole
    # Runs of events are matched together, between broken ones at both ends.
    parts = [events[0], *cut(b"".join(events[1:]), {len(events[1]) + 5})]
    assert until_failed(parts, stock, wants_ids) == whole


@settings(max_examples=examples(1000))
@given(
    pairs=st.lists(
        st.tuples(
            st.sampled_from([b" a"] * 9 + TEXTS + [b"\xe8\xaf", b"\x8d"]),
            st.sampled_from([b"7"] * 9 + IDS),
        ),
        min_size=1,
        max_size=6,
    ),
    wants_ids=st.booleans(),
    limit=st.integers(1, 9),
)
def test_a_run_of_what_are_almost_tokens_is_taken_as_if_it_were_parsed(
    pairs: list[tuple[bytes, bytes]], wants_ids: bool, limit: int
) -> None:
    def event(text: bytes, id_: bytes) -> bytes:
        return frame(b'{"id":"a","choices":[{"text":"%b","token_ids":[%b]}]}' % (text, id_))

    head = [event(b" a", b"1"), event(b" b", b"2")]
    run = b"".join(event(*pair) for pair in pairs)
    whole = until_failed([b"".join(head) + run], False, wants_ids, limit)
    assert until_failed([*head, run], False, wants_ids, limit) == whole


@pytest.mark.parametrize("odd", [[b": ", b"%b"], [b"data: {", b"%b"], [b"%b%b"], [b"%b\r"]])
def test_a_token_within_something_else_is_no_token(odd: list[bytes]) -> None:
    token = b'data: {"id":"a","choices":[{"text":" a","token_ids":[1]}]}\n\n'
    parts = [token, token, *(part.replace(b"%b", token) for part in odd), token]
    assert until_failed(parts, False, True) == until_failed([b"".join(parts)], False, True)


def test_json_of_several_lines_makes_no_mould() -> None:
    token = b'data: {"id":"a",%b"choices":[{"text":" a","token_ids":[1]}]}\n\n'
    parts = [token % b"", token % b"\ndata: ", token % b"\ndata: ", token % b"\n"]
    assert until_failed(parts, False, True) == until_failed([b"".join(parts)], False, True)


@pytest.mark.parametrize("stock", [False, True])
@pytest.mark.parametrize("key", ['"text":"%s"', '"delta":{"content":"%s"}'])
def test_tokens_that_come_alone_are_not_parsed(
    key: str, stock: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def event(text: str, token: int, finish: str = "null") -> bytes:
        shown = key % text
        body = f'{{"id":"a","choices":[{{"index":0,{shown},"finish_reason":{finish},"token_ids":'
        return frame(f"{body}[{token}]}}]}}".encode())

    relay = Relay(call())
    relay.begin(stock=stock, mapped=False)
    relay.feed(event(" a", 1))
    relay.feed(event(" b", 2))
    with monkeypatch.context() as patch:
        patch.setattr(relay, "_parse", None)
        for token in range(10, 30):
            sent = event(f" {token} é", token)
            assert relay.feed(sent) == sent
        run = [event(f" {token} é", token) for token in range(30, 50)]
        assert relay.feed(b"".join(run)) == b"".join(run)
    assert relay.state.tokens == [1, 2, *range(10, 50)]
    assert relay.state.shown == 42
    relay.feed(event("", 3, '"stop"'))
    assert relay.state.finish == "stop"


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
    assert relay.state.tokens == [1, 1]
