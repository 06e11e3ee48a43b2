"""Bodies in, sampling parameters and replies out."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lib.examples import examples

from pigou.request import Grammar
from pigou.wire import openai_replies, request_validation
from pigou.wire.errors import REFUSED, APIError
from pigou.wire.openai_replies import ReplyChunk, StreamEncoder
from pigou.wire.openai_requests import ChatRequest, decode_generation
from pigou.wire.prefill_decode_legs import asks_to_hold, leg_one, leg_two, offers_blocks, ticket
from pigou.wire.sampling_params import Defaults, ModelLimits, sampling_params
from pigou.wire.structured_output import grammar

LIMITS = ModelLimits(max_model_len=100, vocab_size=50)


def completion(**fields: Any) -> Any:
    request = decode_generation(json.dumps({"prompt": "a", **fields}).encode())
    request_validation.check(request)
    return request


def params(request: Any, prompt: int = 10, defaults: Defaults | None = None) -> Any:
    return sampling_params(
        request, prompt, LIMITS, defaults or Defaults(), seed=3, grammar=grammar(request)
    )


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner,
                                                                max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(st.sampled_from(ChatRequest.__struct_fields__), json_values)
@settings(max_examples=examples(600))
def test_any_value_of_any_field_is_taken_or_refused_by_name(name: str, value: Any) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], name: value}
    error = refusal(json.dumps(body).encode())
    if error is not None:
        assert error.status == 400
        assert error.message
        assert error.param is None or error.param


def refusal(body: bytes) -> APIError | None:
    try:
        request = decode_generation(body)
        request_validation.check(request)
        params(request)
    except APIError as error:
        return error
    return None


@given(st.binary(max_size=60))
@settings(max_examples=examples(400))
def test_bytes_that_are_no_body_are_refused(data: bytes) -> None:
    with pytest.raises(APIError):
        decode_generation(data)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_other_servers_know_is_refused_with_a_remedy(name: str) -> None:
    body = {"prompt": "a", "messages": [], name: 7}
    with pytest.raises(APIError, match=REFUSED[name][0].split(";")[0]) as caught:
        decode_generation(json.dumps({k: v for k, v in body.items() if k != "prompt"}).encode())
    assert caught.value.param == name


def test_what_openai_clients_send_without_meaning_here_is_taken() -> None:
    sent = {"store": True, "service_tier": "auto", "verbosity": "low"}
    body = {"messages": [{"role": "developer", "content": "a"}], **sent}
    assert decode_generation(json.dumps(body).encode()).verbosity == "low"
    with pytest.raises(APIError, match="Unknown field loudness"):
        decode_generation(json.dumps(body | {"loudness": 1}).encode())


def test_sampling_follows_the_request_then_the_model_then_the_api() -> None:
    defaults = Defaults(temperature=0.7, top_k=20, top_p=0.8)
    plain = params(completion(), defaults=defaults)
    assert (plain.temperature, plain.top_k, plain.top_p) == (0.7, 20, 0.8)
    asked = params(completion(temperature=0, top_k=-1, top_p=1.0), defaults=defaults)
    assert (asked.temperature, asked.top_k, asked.top_p) == (0, 0, 1.0)
    assert params(completion()).temperature == 1.0


def test_max_tokens_beyond_what_the_prompt_leaves_of_the_context_is_refused() -> None:
    assert params(completion()).max_tokens == 16
    assert params(completion(), prompt=99).max_tokens == 1, "a default is cut"
    assert params(completion(max_tokens=50), prompt=50).max_tokens == 50
    with pytest.raises(APIError, match=r"max_tokens is 50; .* ask for at most 49") as caught:
        params(completion(max_tokens=50), prompt=51)
    assert (caught.value.status, caught.value.param) == (400, "max_tokens")
    with pytest.raises(APIError):
        params(completion(), prompt=100)
    with pytest.raises(APIError):
        params(completion(max_tokens=101))


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar("json_object")),
        (
            {"response_format": {"type": "json_schema",
                                 "json_schema": {"schema": {"type": "object"}}}},
            Grammar("json_schema", '{"type":"object"}'),
        ),
        ({"structured_outputs": {"json": '{"a": 1}'}}, Grammar("json_schema", '{"a":1}')),
        ({"structured_outputs": {"regex": "a+"}}, Grammar("regex", "a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, Grammar("choice", '["a","b"]')),
        ({"structured_outputs": {"grammar": "start: A"}}, Grammar("grammar", "start: A")),
        ({"structured_outputs": {"json_object": True}}, Grammar("json_object")),
    ],
    ids=lambda value: str(value)[:50],
)  # fmt: skip
def test_both_ways_to_ask_for_structure_mean_a_grammar(fields: Any, grammar: Any) -> None:
    assert params(completion(**fields)).grammar == grammar


@given(st.text(max_size=20), st.integers(0, 3), st.booleans())
@settings(max_examples=examples(300))
def test_the_quick_chunk_is_the_full_one(text: str, index: int, chat: bool) -> None:
    stream = StreamEncoder("id", 7, 'a "name"', chat=chat)
    quick, full = stream.text(index, text), stream.chunk(index, ReplyChunk(text))
    parsed = [json.loads(data.removeprefix(b"data: ")) for data in (quick, full)]
    assert parsed[0] == parsed[1]
    assert quick.count(b"\n\n") == 1
    choice = parsed[0]["choices"][0]
    assert (choice["delta"]["content"] if chat else choice["text"]) == text


def test_an_error_has_vllms_envelope() -> None:
    error = APIError(503, "full", retry_after=2)
    assert json.loads(error.body()) == {
        "error": {"message": "full", "type": "ServiceUnavailableError", "param": None, "code": 503}
    }


def test_leg_one_asks_for_one_token_and_leg_two_is_the_clients() -> None:
    body = {"messages": [], "stream": True, "stream_options": {}, "max_tokens": 9, "top_p": 0.5}
    one = leg_one(body, chat=True)
    assert one["max_tokens"] == one["max_completion_tokens"] == 1
    assert (one["stream"], one["top_p"]) == (False, 0.5)
    assert "stream_options" not in one
    assert asks_to_hold(one["kv_transfer_params"])
    given = ticket(msgspec.json.encode({"id": "x", "kv_transfer_params": {"a": [1]}}))
    assert given == {"a": [1]}
    assert leg_two(body, given) == body | {"kv_transfer_params": given}
    assert offers_blocks({"do_remote_prefill": True})
    assert not offers_blocks(None)
    with pytest.raises(APIError):
        offers_blocks({"do_remote_prefill": "yes"})


def test_usage_counts_and_details() -> None:
    told = msgspec.to_builtins(openai_replies.usage(3, 4, 2))
    assert told == {
        "prompt_tokens": 3, "total_tokens": 7, "completion_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 2},
    }  # fmt: skip
