"""Chunks that deviate from the API in harmless ways end no stream, and clients do not meet them."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stub import Fleet, Script, Stub, serving, whole_text
from tests.lib.examples import examples

from pigou.gateway.proxy.reply_parsing import normalized, whole, with_cached_tokens
from pigou.request import Role
from pigou.wire.sse import Reader

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
BOM = b"\xef\xbb\xbf"


def data(**fields: Any) -> bytes:
    return b"data: " + json.dumps({"id": "x", "created": 1, "model": "m", **fields}).encode()


ODD = {
    "null choices": data(choices=None),
    "no choices": data(object="x"),
    "no object": data(choices=[]),
    "empty delta": data(choices=[{"index": 0, "delta": {}}]),
    "null delta": data(choices=[{"index": 0, "delta": None, "text": None}]),
    "null choice": data(choices=[None]),
    "float index": data(choices=[{"index": 0.0, "delta": {"content": ""}, "text": ""}]),
    "float created": data(created=1700000000.25, choices=[{"index": 0, "text": "", "delta": {}}]),
    "null head": data(id=None, model=None, created=None, choices=[]),
    "float usage": data(choices=[], usage={"prompt_tokens": 3.0, "completion_tokens": 1.0}),
    "null usage": data(choices=[{"index": 0, "text": "", "delta": {}}], usage=None),
    "null error": data(choices=[], error=None),
    "empty error": data(choices=[], error={}),
    "empty finish": data(choices=[{"index": 0, "text": "", "delta": {}, "finish_reason": ""}]),
    "filter results": data(id="", model="", choices=[], prompt_filter_results=[{"index": 0}]),
    "null ids": data(choices=[{"index": 0, "text": "", "delta": {}, "token_ids": None}]),
    "empty data": b"data:",
    "null": b"data: null",
    "a number": b"data: 5",
    "comment": b": keep-alive",
    "event only": b"event: ping",
    "event, id and retry": b"event: message\nid: 7\nretry: 3000\n" + data(choices=None),
    "ping": b'event: ping\ndata: {"type": "ping"}',
}


async def streamed(fleet: Fleet, path: str) -> tuple[str, list[dict[str, Any]]]:
    """Return the text of a stream and its chunks, as a strict client reads them."""
    prompt = {"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {"prompt": "x"}
    body = prompt | {"stream": True, "max_tokens": 12}
    async with (
        aiohttp.ClientSession() as session,
        session.post(fleet.url + path, json=body) as response,
    ):
        assert response.status == 200
        raw = await response.read()
    *frames, done, rest = raw.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    chunks = [json.loads(frame.removeprefix(b"data: ")) for frame in frames]
    text = ""
    for chunk in chunks:
        assert "error" not in chunk or not chunk["error"], chunk
        for choice in chunk["choices"]:
            assert isinstance(choice["index"], int)
            text += (
                (choice["delta"].get("content") or "") if path == CHAT else choice.get("text", "")
            )
    return text, chunks


@pytest.mark.parametrize("path", [TEXT, CHAT])
@pytest.mark.parametrize("stock", [False, True])
@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
async def test_a_harmless_chunk_ends_no_stream(odd: bytes, stock: bool, path: str) -> None:
    for line_end in (b"\n", b"\r\n"):
        frame = odd.replace(b"\n", line_end) + 2 * line_end
        script = Script(odd=frame, opening=frame)
        async with serving(Stub("a", stock=stock, script=script), strict=not stock) as fleet:
            text, _ = await streamed(fleet, path)
            assert text == whole_text(12)
            assert len(fleet.stubs["a"].seen) == 1, "it was sent again"


@pytest.mark.parametrize("odd", ["null choices", "float usage", "filter results"])
async def test_a_stream_with_odd_chunks_goes_on_elsewhere(odd: str) -> None:
    script = Script(odd=ODD[odd] + b"\n\n", die_after=3, times=1)
    async with serving(Stub("a", script=script), Stub("b", script=script)) as fleet:
        text, _ = await streamed(fleet, CHAT)
        assert text == whole_text(12)
        assert sum(len(stub.seen) for stub in fleet.stubs.values()) == 2


@pytest.mark.parametrize("done", [b"data: [DONE]", b"data: [DONE]\n", b"data:[DONE]\r\n\r\n",
                                  b"data: [DONE] \n\n"])  # fmt: skip
async def test_the_end_of_a_stream_needs_no_blank_line(done: bytes) -> None:
    async with serving(Stub("a", script=Script(done=done))) as fleet:
        text, _ = await streamed(fleet, TEXT)
        assert text == whole_text(12)
        assert len(fleet.stubs["a"].seen) == 1


async def test_a_byte_order_mark_before_a_stream_is_skipped() -> None:
    async with serving(Stub("a", script=Script(opening=BOM))) as fleet:
        assert (await streamed(fleet, TEXT))[0] == whole_text(12)


async def test_an_error_that_is_a_text_is_an_error() -> None:
    script = Script(odd=b'data: {"error": "out of memory"}\n\n', times=0)
    async with serving(Stub("a", script=script)) as fleet, aiohttp.ClientSession() as session:
        body = {"prompt": "x", "stream": True}
        async with session.post(fleet.url + TEXT, json=body) as response:
            assert response.status == 502
            assert "out of memory" in (await response.json())["error"]["message"]


@given(st.binary(max_size=40), st.integers(0, 40))
def test_a_reader_skips_the_mark_wherever_the_bytes_are_cut(payload: bytes, cut: int) -> None:
    payload = payload.replace(b"\n", b"").replace(b"\r", b"")
    stream = BOM + b"data: " + payload + b"\n\n"
    reader = Reader()
    assert reader.feed(stream[:cut]) + reader.feed(stream[cut:]) == [payload]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["choices", "index", "delta", "content", "text", "finish_reason", "usage",
                         "token_ids", "error", "id", "created", "prompt_tokens", "nvext"]),
        inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=examples(500))
@given(json_values)
def test_any_json_is_brought_into_the_shape_of_a_chunk(value: Any) -> None:
    raw = json.dumps(value, allow_nan=False, default=str) if _finite(value) else "{}"
    try:
        body = normalized(raw.encode())
    except UnicodeEncodeError:  # a lone surrogate
        return
    except msgspec.DecodeError as error:
        if "token ids" in str(error) or "out of range" in str(error):
            return
        raise
    assert all(isinstance(choice, dict) for choice in body.get("choices", []))
    whole(json.dumps(body).encode())


def _finite(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return False
    return True


async def test_cached_tokens_are_those_of_the_worker_that_computed_the_prompt() -> None:
    prefill = Stub("p", role=Role.PREFILL, script=Script(cached=3))
    decode = Stub("d", role=Role.DECODE, script=Script(cached=9))
    async with serving(prefill, decode) as fleet, aiohttp.ClientSession() as session:
        body = {"prompt": "0123456789" * 40, "max_tokens": 4}
        async with session.post(fleet.url + TEXT, json=body) as response:
            usage = (await response.json())["usage"]
        assert len(prefill.seen) == 1
        assert usage["prompt_tokens_details"]["cached_tokens"] == 3
        stream = body | {"stream": True, "stream_options": {"include_usage": True}}
        async with session.post(fleet.url + TEXT, json=stream) as response:
            last = (await response.read()).split(b"\n\n")[-3]
        details = json.loads(last.removeprefix(b"data: "))["usage"]["prompt_tokens_details"]
        assert details["cached_tokens"] == 3


@pytest.mark.parametrize("payload", [b"[]", b"{}", b"x", b'{"usage": null}', b'{"usage": 3}',
                                     b'{"usage":{"prompt_tokens_details":null}}'])  # fmt: skip
def test_what_tells_no_cached_tokens_is_left_as_it_is(payload: bytes) -> None:
    assert with_cached_tokens(payload, 3) == payload
