"""Responses and Messages are chats in other words: what is asked, and what comes back."""

from __future__ import annotations

import itertools
import json
import re
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lib.examples import examples

from pigou.gateway.failure import Rejected
from pigou.gateway.proxy.server_routes import is_absent
from pigou.wire.chat_translation import ChatTranslation, renamed, renaming
from pigou.wire.errors import APIError
from pigou.wire.messages import Messages, error_body
from pigou.wire.openai_requests import ChatRequest, known
from pigou.wire.request_validation import check
from pigou.wire.responses import Responses, ResponseStore, answer_stored
from pigou.wire.sampling_params import max_tokens
from pigou.wire.sse import DONE, frame
from pigou.wire.structured_output import tool_use

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
USAGE = {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13,
         "prompt_tokens_details": {"cached_tokens": 2},
         "completion_tokens_details": {"reasoning_tokens": 1}}  # fmt: skip


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def response(kept: ResponseStore | None = None, id: str = "a", **fields: Any) -> Responses:
    data = json.dumps({"model": "m", "input": "hi"} | fields).encode()
    return Responses(data, id, "t", kept or ResponseStore(Clock()))


def message(**fields: Any) -> Messages:
    asked = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    return Messages(json.dumps(asked | fields).encode(), "a")


def chat(translation: ChatTranslation) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(translation.body)
    return body


def parts(text: str = "Yes.") -> dict[str, Any]:
    """A chat's message with reasoning, content and two calls."""
    calls = [
        {"id": id, "type": "function", "function": {"name": "f", "arguments": '{"city": 1}'}}
        for id in ("c0", "c1")
    ]
    return {"role": "assistant", "content": text, "reasoning": "Hm.", "reasoning_content": "Hm.",
            "tool_calls": calls}  # fmt: skip


def reply(said: dict[str, Any], finish: str = "tool_calls", stop: Any = None) -> bytes:
    choice = {"index": 0, "message": said, "finish_reason": finish, "stop_reason": stop}
    return json.dumps({"id": "x", "created": 5, "model": "m", "choices": [choice],
                       "usage": USAGE}).encode()  # fmt: skip


def chunks(said: dict[str, Any], cuts: list[int], finish: str = "tool_calls") -> list[bytes]:
    """A chat's stream of a message, each text in pieces."""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]

    def pieces(text: str) -> list[str]:
        places = [0, *sorted({cut % (len(text) + 1) for cut in cuts}), len(text)]
        return [text[a:b] for a, b in itertools.pairwise(places)]

    deltas += [{"reasoning": part, "reasoning_content": part} for part in pieces(said["reasoning"])]
    deltas += [{"content": part} for part in pieces(said["content"])]
    for index, call in enumerate(said["tool_calls"]):
        first = {**call, "function": {**call["function"], "arguments": ""}}
        deltas.append({"tool_calls": [{"index": index, **first}]})
        deltas += [{"tool_calls": [{"index": index, "function": {"arguments": part}}]}
                   for part in pieces(call["function"]["arguments"])]  # fmt: skip
    head = {"id": "x", "created": 5, "model": "m"}
    bodies = [head | {"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    bodies.append(head | {"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    bodies.append(head | {"choices": [], "usage": USAGE})
    return [frame(json.dumps(body).encode()) for body in bodies] + [DONE]


def events(data: bytes) -> list[dict[str, Any]]:
    found = []
    for entry in data.decode().strip().split("\n\n"):
        kind, payload = entry.split("\n")
        found.append(json.loads(payload.removeprefix("data: ")))
        assert kind == f"event: {found[-1]['type']}"
    return found


def told(translation: ChatTranslation) -> APIError:
    """The refusal of a translated request, as a worker or a gateway sends it."""

    def judge() -> None:
        wanted = known(ChatRequest, translation.body).request
        check(wanted)
        tool_use(wanted)
        max_tokens(wanted, 10, 99)

    with pytest.raises(APIError) as caught, renaming(translation.field):
        judge()
    return caught.value


#: Values that a chat's fields refuse.
_BAD = st.one_of(
    st.integers(100, 2**40), st.integers(-9, -1), st.just([]), st.just(""), st.booleans(),
    st.lists(st.integers(), min_size=1), st.dictionaries(st.text(max_size=3), st.integers()),
    st.just([{"name": "max_completion_tokens messages[0].content response_format"}]),
    st.just({"type": "json_schema", "schema": False}), st.just([{"role": "function"}]),
    st.just([""]), st.just([{"name": "f"}, {"name": "f"}]), st.text(max_size=9),
    st.just({"format": {"type": "json_schema", "schema": False}}), st.just({"format": {"type": 1}}),
    st.just([{"type": "function", "name": "?"}]), st.just({"effort": "messages"}),
)  # fmt: skip
_OF_CHATS = re.compile(r"max_completion_tokens|response_format|\bstop\b|reasoning_effort"
                       r"|\.function|messages\[\d+\]\.tool_calls|parallel_tool_calls")  # fmt: skip


@settings(max_examples=examples(60))
@given(st.sampled_from(["responses", "messages"]), st.data())
def test_a_refusal_names_the_field_that_the_client_sent(api: str, data: st.DataObject) -> None:
    own = {"responses": ["input", "max_output_tokens", "text", "tools", "tool_choice", "reasoning",
                         "temperature", "top_p"],
           "messages": ["system", "messages", "max_tokens", "tools", "tool_choice", "temperature",
                        "stop_sequences", "output_config", "top_k"]}[api]  # fmt: skip
    name = data.draw(st.sampled_from(own))
    fields = {name: data.draw(_BAD)}
    try:
        made = response(**fields) if api == "responses" else message(**fields)
        error = told(made)
    except APIError as early:
        error = early
    except pytest.fail.Exception:
        return  # the value is good
    unquoted = re.sub(r"""(?<!\w)(["']).*?\1(?!\w)""", "", error.message)
    assert error.status == 400
    assert not _OF_CHATS.search(unquoted), error.message
    assert (error.param or "").split(".")[0].split("[")[0] == name, (error.param, error.message)


@pytest.mark.parametrize(("made", "names", "param"), [
    (lambda: response(max_output_tokens=2000), "max_output_tokens is 2000", "max_output_tokens"),
    (lambda: response(input=[]), "input is empty", "input"),
    (lambda: response(instructions="a", input=[{"role": "user", "content": 3}]),
     "input[0].content must be", "input[0].content"),
    (lambda: response(input=[{"type": "function_call_output", "call_id": "1", "output": 3}]),
     "input[0].output must be", "input[0].output"),
    (lambda: response(text={"format": {"type": "json_schema"}}), "text.format.schema is missing",
     "text.format"),
    (lambda: message(tools=[{"name": "?"}]), "tools[0].name must", "tools"),
    (lambda: message(tools=[{"name": "a", "input_schema": 3}]), "tools[0].input_schema", "tools"),
    (lambda: message(stop_sequences=[""]), "stop_sequences holds", "stop_sequences"),
    (lambda: message(system="s", messages=[{"role": "user", "content": 3}]),
     "messages[0].content must", "messages"),
])  # fmt: skip
def test_a_path_in_a_refusal_is_the_clients(made: Any, names: str, param: str) -> None:
    error = told(made())
    assert error.message.startswith(names)
    assert param.startswith(error.param or "?")


def test_a_word_or_a_value_is_no_field() -> None:
    text = "tool_choice is 'max_tokens'; stop it, and max_completion_tokens"
    shown = "tool_choice is 'max_tokens'; stop it, and max_output_tokens"
    assert renamed(text, response().field) == shown


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "\ud800\ud800", "\\\udc00"])
def test_half_a_surrogate_pair_is_refused_by_its_field(text: Any) -> None:
    for begin, name in ((response, "input"), (response, "instructions"), (message, "system")):
        with pytest.raises(APIError, match="half a surrogate pair") as caught:
            begin(**{name: text})
        assert (caught.value.status, caught.value.param) == (400, name)
    assert response(input="\ud83d\ude00").body  # a whole pair


def test_bytes_that_are_no_utf8_are_refused_wherever_they_stand() -> None:
    for make in (Messages, partial(Responses, tenant="t", store=ResponseStore(Clock()))):
        with pytest.raises(APIError, match="UTF-8"):
            make(b'{"model":"\xed\xa0\x80","input":"a","messages":[],"max_tokens":1}', id="a")


def test_a_refusal_does_not_repeat_a_long_value() -> None:
    with pytest.raises(APIError) as caught:
        response(truncation="x" * 99_999)
    assert len(caught.value.message) < 500


# --- Responses ----------------------------------------------------------------------------------


def test_a_response_asks_a_chat() -> None:
    tool = {"type": "function", "name": "f", "parameters": SCHEMA, "strict": True}
    form = {"type": "json_schema", "name": "s", "schema": SCHEMA, "strict": True}
    asked = chat(response(
        instructions="Be short.", max_output_tokens=7, temperature=0.5, top_p=0.9, seed=3,
        tools=[tool], tool_choice={"type": "function", "name": "f"}, parallel_tool_calls=False,
        text={"format": form, "verbosity": "low"}, reasoning={"effort": "low"}, stream=True,
        metadata={"a": "b"}, truncation="disabled", background=False,
    ))  # fmt: skip
    function = {"name": "f", "parameters": SCHEMA, "strict": True}
    assert asked == {
        "model": "m", "temperature": 0.5, "top_p": 0.9, "seed": 3, "parallel_tool_calls": False,
        "messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "hi"}],
        "max_completion_tokens": 7, "verbosity": "low", "reasoning_effort": "low",
        "tools": [{"type": "function", "function": function}], "stream": True,
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "stream_options": {"include_usage": True},
        "response_format": {"type": "json_schema",
                            "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}},
    }  # fmt: skip
    assert chat(response(reasoning={"effort": "none"}))["chat_template_kwargs"] == {
        "enable_thinking": False, "thinking": False
    }  # fmt: skip


def test_items_become_messages() -> None:
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "SG0u"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "c"},
        {"type": "function_call", "call_id": "3", "name": "f", "arguments": "{}"},
    ]
    said = chat(response(input=items))["messages"]
    assert [one["role"] for one in said] == ["developer", "assistant", "tool", "assistant"]
    assert said[1]["content"] == [{"type": "text", "text": "b"}]
    assert said[1]["reasoning_content"] == "Hm."
    assert [call["id"] for call in said[1]["tool_calls"]] == ["1", "2"]
    assert said[2] == {"role": "tool", "tool_call_id": "1", "content": "c"}


@pytest.mark.parametrize(("fields", "names"), [
    ({"background": True}, "background"), ({"conversation": "c"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"), ({"n": 2}, "n"), ({"max_tokens": 2}, "max_tokens"),
    ({"truncation": "auto"}, "truncation"), ({"include": ["x"]}, "include"),
    ({"tools": [{"type": "web_search"}]}, "web_search"), ({"input": None}, "input"),
    ({"tool_choice": {"type": "mcp"}}, "tool_choice"), ({"reasoning": {"x": 1}}, "reasoning.x"),
    ({"text": {"x": 1}}, "text.x"), ({"input": [{"type": "web_search_call"}]}, "web_search_call"),
    ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input_file"),
    ({"input": [{"type": "reasoning", "encrypted_content": "?"}]}, "input[0]"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
])  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(fields: dict[str, Any], names: str) -> None:
    with pytest.raises(APIError) as caught:
        response(**fields)
    assert caught.value.status == 400
    assert names in caught.value.message


@settings(max_examples=examples(60))
@given(st.lists(st.integers(0, 20), max_size=4), st.integers(1, 60), st.booleans())
def test_a_streamed_response_is_the_whole_one(cuts: list[int], size: int, summary: bool) -> None:
    fields = {"reasoning": {"summary": "auto"}} if summary else {}
    whole = json.loads(response(**fields).whole(reply(parts())))
    stream, data = response(stream=True, **fields), b"".join(chunks(parts(), cuts))
    told = b"".join(stream.feed(data[at : at + size]) for at in range(0, len(data), size))
    seen = events(told)
    assert [event["sequence_number"] for event in seen] == list(range(len(seen)))
    assert seen[-1] == {"type": "response.completed", "sequence_number": len(seen) - 1,
                        "response": whole}  # fmt: skip
    assert [event["type"] for event in seen[:3]] == [
        "response.created", "response.in_progress", "response.output_item.added"
    ]  # fmt: skip
    deltas: dict[int, str] = {}
    for event in seen:
        if event["type"].endswith(".delta"):
            deltas[event["output_index"]] = deltas.get(event["output_index"], "") + event["delta"]
    assert deltas == {0: "Hm.", 1: "Yes.", 2: '{"city": 1}', 3: '{"city": 1}'}
    done = [event["item"] for event in seen if event["type"] == "response.output_item.done"]
    assert done == whole["output"]
    assert [item["type"] for item in done] == ["reasoning", "message", *["function_call"] * 2]
    assert bool(done[0]["summary"]) is summary


def test_responses_and_events_have_openais_types() -> None:
    openai = pytest.importorskip("openai.types.responses")
    pydantic = pytest.importorskip("pydantic")
    event_type = pydantic.TypeAdapter(openai.ResponseStreamEvent)
    for fields in (
        {},
        {"reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"]},
    ):
        stream = response(stream=True, **fields)
        for event in events(b"".join(map(stream.feed, chunks(parts(), [2])))):
            parsed = event_type.validate_python(event)
            known = {"name", "status"}  # of arguments.done and of a reasoning item, if newer
            assert set(event) - known <= set(type(parsed).model_fields), event["type"]
        whole = json.loads(response(**fields).whole(reply(parts())))
        body = openai.Response.model_validate(whole)
        assert set(whole) <= set(openai.Response.model_fields) | {"store"}
        assert body.usage.output_tokens_details.reasoning_tokens == 1


def test_the_end_is_completed_cut_or_failed() -> None:
    cut = json.loads(response().whole(reply(parts(), "length")))
    assert (cut["status"], cut["incomplete_details"]) == (
        "incomplete", {"reason": "max_output_tokens"}
    )  # fmt: skip
    stream = response(stream=True)
    first, *_ = chunks(parts(), [])
    told = events(stream.feed(first + frame(b'{"error": {"message": "no", "code": 502}}') + DONE))
    assert told[-1]["type"] == "response.failed"
    assert told[-1]["response"]["error"]["message"] == "no"


# --- the store ----------------------------------------------------------------------------------


def test_a_conversation_goes_on_by_the_id_of_its_last_response() -> None:
    store = ResponseStore(Clock())
    whole = response(store, instructions="A.").whole(reply(parts()))
    next_one = response(store, "b", input=[{"type": "function_call_output", "call_id": "c0",
                                            "output": "1"}],
                        instructions="B.", previous_response_id="resp_a")  # fmt: skip
    said = chat(next_one)["messages"]
    assert [one["role"] for one in said] == ["system", "user", "assistant", "tool"]
    assert said[0]["content"] == "B."
    assert said[2]["reasoning_content"] == "Hm."
    assert [call["id"] for call in said[2]["tool_calls"]] == ["c0", "c1"]
    assert answer_stored(store, "t", "GET", "resp_a") == whole
    referred = {"type": "item_reference", "id": "msg_a_1"}
    assert chat(response(store, "c", input=[referred]))["messages"][0]["content"] == [
        {"type": "text", "text": "Yes."}
    ]
    assert json.loads(answer_stored(store, "t", "DELETE", "resp_a"))["deleted"]
    for call in (
        lambda: answer_stored(store, "t", "GET", "resp_a"),
        lambda: response(store, previous_response_id="resp_a"),
        lambda: response(store, input=[referred]),
    ):
        with pytest.raises(APIError, match="not found") as caught:
            call()
        assert (caught.value.status, caught.value.type) == (404, "invalid_request_error")


def test_the_store_is_bounded_in_bytes_and_age_for_each_tenant() -> None:
    clock = Clock()
    store = ResponseStore(clock, max_bytes=2500, ttl_s=10)
    for number in range(4):
        store.put("a", str(number), b"x" * 1000, [])
        store.put("b", str(number), b"x" * 10, [])
    assert [store.find("a", str(number)) is not None for number in range(4)] == [False] * 2 + [
        True
    ] * 2
    assert store.find("b", "0") is not None
    clock.now = 10.0
    assert store.find("a", "3") is None
    store.put("a", "big", b"x" * 3000, [])
    assert store.find("a", "big") is None
    response(store, store=False).whole(reply(parts()))
    assert store.find("t", "resp_a") is None


# --- Messages -----------------------------------------------------------------------------------


def test_a_message_asks_a_chat() -> None:
    tool = {"name": "f", "description": "d", "input_schema": SCHEMA}
    content: list[dict[str, Any]] = [
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "1", "name": "f", "input": {"city": "Rome"}},
    ]
    results = [
        {"type": "text", "text": "And?"},
        {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "5"}]},
    ]
    asked = chat(message(
        system=[{"type": "text", "text": "S", "cache_control": {"type": "ephemeral"}}],
        messages=[{"role": "user", "content": "hi"}, {"role": "assistant", "content": content},
                  {"role": "user", "content": results}],
        tools=[tool], tool_choice={"type": "any", "disable_parallel_tool_use": True}, top_k=4,
        stop_sequences=["x"], thinking={"type": "enabled", "budget_tokens": 1024}, stream=True,
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
    ))  # fmt: skip
    roles = [one["role"] for one in asked["messages"]]
    assert roles == ["system", "user", "assistant", "tool", "user"]
    assert asked["messages"][2]["reasoning_content"] == "Hm."
    call = asked["messages"][2]["tool_calls"][0]["function"]
    assert json.loads(call["arguments"]) == {"city": "Rome"}
    assert asked["messages"][3]["content"] == [{"type": "text", "text": "5"}]
    function = {"name": "f", "description": "d", "parameters": SCHEMA}
    assert asked["tools"] == [{"type": "function", "function": function}]
    assert (asked["tool_choice"], asked["parallel_tool_calls"]) == ("required", False)
    assert (asked["stop"], asked["max_tokens"], asked["top_k"]) == (["x"], 9, 4)
    assert asked["chat_template_kwargs"]["enable_thinking"]
    assert asked["response_format"]["json_schema"]["schema"] == SCHEMA
    assert asked["stream_options"] == {"include_usage": True}


def test_a_failed_tool_says_so_and_reasoning_may_be_omitted() -> None:
    failed = {"type": "tool_result", "tool_use_id": "1", "content": "no", "is_error": True}
    hidden = {"type": "adaptive", "display": "omitted"}
    body = chat(message(messages=[{"role": "user", "content": [failed]}], thinking=hidden))
    assert [part["text"] for part in body["messages"][0]["content"]] == ["Error:", "no"]
    assert body["include_reasoning"] is False


@pytest.mark.parametrize(("fields", "names"), [
    ({"thinking": {"type": "adaptive", "x": 1}}, "thinking.x"),
    ({"max_tokens": None}, "max_tokens"), ({"tools": [{"type": "bash_20250124"}]}, "bash_20250124"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"), ({"n": 2}, "n"),
    ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "document"),
    ({"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking"}]}]}, "redacted"),
    ({"container": "c"}, "container"), ({"thinking": {"type": "x"}}, "thinking"),
    ({"output_config": {"x": 1}}, "output_config.x"),
])  # fmt: skip
def test_what_a_message_cannot_have_is_refused_by_name(fields: dict[str, Any], names: str) -> None:
    with pytest.raises(APIError) as caught:
        message(**fields)
    assert caught.value.status == 400
    assert names in caught.value.message


@settings(max_examples=examples(60))
@given(st.lists(st.integers(0, 20), max_size=4), st.integers(1, 60))
def test_a_streamed_message_is_the_whole_one(cuts: list[int], size: int) -> None:
    whole = json.loads(message().whole(reply(parts())))
    stream, data = message(stream=True), b"".join(chunks(parts(), cuts))
    seen = events(b"".join(stream.feed(data[at : at + size]) for at in range(0, len(data), size)))
    built = seen[0]["message"]
    for event in seen:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(built["content"])
                built["content"].append(event["content_block"])
            case "content_block_delta":
                block, delta = built["content"][event["index"]], event["delta"]
                (name,) = delta.keys() - {"type"}
                block[name] = block.get(name, "") + delta[name]
            case "message_delta":
                built |= {**event["delta"], "usage": event["usage"]}
    for block in built["content"]:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block.pop("partial_json"))
    assert built == whole
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", *["tool_use"] * 2]
    assert whole["usage"] == {"input_tokens": 7, "cache_creation_input_tokens": 0,
                              "cache_read_input_tokens": 2, "output_tokens": 4}  # fmt: skip
    kinds = [event["type"] for event in seen]
    assert (kinds[:2], kinds[-2:]) == (["message_start", "ping"], ["message_delta", "message_stop"])


@pytest.mark.parametrize(("finish", "stop", "reason"), [
    ("stop", None, "end_turn"), ("stop", "x", "stop_sequence"), ("stop", 7, "end_turn"),
    ("length", None, "max_tokens"), ("tool_calls", None, "tool_use"),
])  # fmt: skip
def test_a_message_says_why_it_stopped(finish: str, stop: Any, reason: str) -> None:
    whole = json.loads(message().whole(reply(parts(), finish, stop)))
    assert whole["stop_reason"] == reason
    assert whole["stop_sequence"] == ("x" if reason == "stop_sequence" else None)


def test_a_worker_s_refusal_keeps_its_words_in_anthropic_s_form() -> None:
    refusal = json.dumps(
        {"error": {"message": "tools[0].function.name is missing", "code": 400}}
    ).encode()
    for answer, words in ((refusal, "tools[0].name is missing"), (b"[]", "the worker answered 400"),
                          (b'{"error": 1}', "the worker answered 400")):  # fmt: skip
        with pytest.raises(APIError) as caught, renaming(message().field):
            raise Rejected(400, answer)
        body = json.loads(error_body(caught.value, "r"))
        assert body["error"] == {"type": "invalid_request_error", "message": words}


def test_a_refused_object_does_not_hide_its_route_however_long_the_refusal() -> None:
    refusal = json.dumps({"error": {"message": f"no model {'x' * 99_999}"}}).encode()
    for cut in (len(refusal), 16_384, 9):
        assert not is_absent(404, refusal[:cut])
    assert is_absent(404, b'{"detail":"Not Found"}')
    assert is_absent(404, b"404: Not Found")
