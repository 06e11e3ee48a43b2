"""Every field of the `openai` package's request types is honoured, or refused by name."""

from __future__ import annotations

import collections.abc
import json
import types
import typing
from typing import Annotated, Any

import pytest
import typing_extensions

from pigou.wire.errors import REFUSED, APIError
from pigou.wire.openai_requests import (
    HEADER,
    ChatRequest,
    CompletionRequest,
    Known,
    UnknownFields,
    header_value,
    known,
    neutral,
)
from pigou.wire.request_validation import check

pytest.importorskip("openai")
from openai.types import completion_create_params as completion_params
from openai.types.chat import chat_completion_message_param as message_param
from openai.types.chat import completion_create_params as chat_params

CHAT = typing_extensions.get_type_hints(chat_params.CompletionCreateParamsBase)
COMPLETION = typing_extensions.get_type_hints(completion_params.CompletionCreateParamsBase)
#: The value of each field by which a client says "as always", as OpenAI's documentation has it.
NEUTRAL: dict[str, Any] = {
    "audio": None, "best_of": 1, "echo": False, "frequency_penalty": 0, "function_call": "none",
    "functions": [], "logit_bias": {}, "logprobs": False, "max_completion_tokens": None,
    "max_tokens": None, "metadata": {}, "modalities": ["text"], "moderation": None, "n": 1,
    "parallel_tool_calls": True, "prediction": None, "presence_penalty": 0,
    "prompt_cache_key": "", "prompt_cache_options": {"mode": "implicit"},
    "prompt_cache_retention": None, "reasoning_effort": None, "response_format": {"type": "text"},
    "safety_identifier": "", "seed": None, "service_tier": "auto", "stop": [], "store": False,
    "stream": False, "stream_options": {"include_usage": False}, "suffix": "", "temperature": 1,
    "tool_choice": "none", "tools": [], "top_logprobs": 0, "top_p": 1, "user": "",
    "verbosity": "medium", "web_search_options": None,
}  # fmt: skip
_SCALARS: dict[Any, list[Any]] = {str: ["a"], int: [1], float: [0.5, 1], bool: [True, False]}


def values(kind: Any, depth: int = 0) -> list[Any]:  # noqa: PLR0911
    """Return plausible values of a type of the `openai` package, at least one a variant."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is type(None):
        return [None]
    if kind in _SCALARS:
        return _SCALARS[kind]
    if origin is typing.Literal:
        return list(arguments)
    if origin in (typing.Union, types.UnionType):
        return [value for argument in arguments for value in values(argument, depth)]
    if origin in (typing_extensions.Required, typing_extensions.NotRequired, Annotated):
        return values(arguments[0], depth)
    if origin in (list, collections.abc.Iterable, collections.abc.Sequence):
        return [[value] for value in values(arguments[0], depth + 1)]
    if origin is dict:
        return [{"5": values(arguments[1], depth + 1)[0]}]
    if typing_extensions.is_typeddict(kind):
        return objects(kind, depth)
    return [{"type": "object"}]


def objects(kind: Any, depth: int) -> list[Any]:
    """Return the object with its required fields alone, and with each further one."""
    hints = typing_extensions.get_type_hints(kind, include_extras=True)
    required = [name for name, hint in hints.items()
                if typing.get_origin(hint) is typing_extensions.Required]  # fmt: skip
    least = {name: values(hints[name], depth + 1)[0] for name in required}
    found: list[Any] = [least]
    if depth < 4:
        for name, hint in hints.items():
            found += [least | {name: value} for value in values(hint, depth + 1)[:8]]
    return found


def outcome(chat: bool, body: dict[str, Any]) -> APIError | ChatRequest | CompletionRequest:
    """Return what a server makes of a body: its request, or its refusal; nothing is unknown."""
    data = json.dumps(body).encode()
    try:
        found: Known[Any] = known(ChatRequest if chat else CompletionRequest, data)
        assert not found.unknown, "a field of the API is not known by name"
        check(found.request)
    except APIError as error:
        return error
    return found.request


def base(chat: bool, name: str) -> dict[str, Any]:
    body: dict[str, Any] = (
        {"messages": [{"role": "user", "content": "a"}]} if chat else {"prompt": "a"}
    )
    if name == "stream_options":
        body["stream"] = True
    if name == "top_logprobs":
        body["logprobs"] = True
    return body


@pytest.mark.parametrize(
    ("chat", "name"),
    [(True, name) for name in CHAT] + [(False, name) for name in COMPLETION],
)
def test_each_field_is_honoured_or_refused_by_name(chat: bool, name: str) -> None:
    hints = CHAT if chat else COMPLETION
    fields = (ChatRequest if chat else CompletionRequest).__struct_fields__
    for value in values(hints[name]):
        found = outcome(chat, base(chat, name) | {name: value})
        if isinstance(found, APIError):
            assert found.status == 400
            assert (found.param or "").split(".")[0] == name, (value, found.message)
            assert name in found.message, (value, found.message)
            continue
        assert name in fields or neutral(name, value), f"{name}: {value!r} is dropped in silence"


@pytest.mark.parametrize(
    ("chat", "name"),
    [(True, name) for name in CHAT if name not in ("messages", "model")]
    + [(False, name) for name in COMPLETION if name not in ("prompt", "model")],
)
def test_each_field_is_taken_as_null_and_at_its_neutral_value(chat: bool, name: str) -> None:
    for value in (None, NEUTRAL[name]):
        found = outcome(chat, base(chat, "") | {name: value})
        assert not isinstance(found, APIError), (value, found)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_each_refused_field_is_taken_as_null(name: str) -> None:
    for chat in (True, False):
        assert not isinstance(outcome(chat, base(chat, "") | {name: None}), APIError)


@pytest.mark.parametrize("message", values(message_param.ChatCompletionMessageParam))
def test_each_message_is_taken_or_refused_by_name(message: dict[str, Any]) -> None:
    found = outcome(True, {"messages": [message]})
    if isinstance(found, APIError):
        assert found.param == "messages"
        assert "messages[0]" in found.message
    else:
        shown = message.get("content") or message.get("refusal") or message.get("tool_calls")
        assert shown or set(message) <= {"role", "content", "name", "refusal", "tool_calls",
                                         "audio", "function_call"}  # fmt: skip
        assert message.get("audio") is None
        assert message.get("function_call") is None
        parts = message.get("content") if isinstance(message.get("content"), list) else []
        assert all(part["type"] in ("text", "refusal") for part in parts or [])


@pytest.mark.parametrize("n", [1, 3])
def test_best_of_that_returns_all_it_computes_is_taken(n: int) -> None:
    assert not isinstance(outcome(False, {"prompt": "a", "n": n, "best_of": n}), APIError)
    assert isinstance(outcome(False, {"prompt": "a", "n": n, "best_of": n + 1}), APIError)


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({"max_tokens": "3"}, "max_tokens", 3),
        ({"max_tokens": 3.0}, "max_tokens", 3),
        ({"temperature": "0.5"}, "temperature", 0.5),
        ({"stream": 0}, "stream", False),
        ({"prompt": [5.0, 6.0]}, "prompt", [5, 6]),
    ],
)
def test_numbers_are_read_as_vllm_reads_them(fields: Any, name: str, value: Any) -> None:
    found = outcome(False, {"prompt": "a"} | fields)
    assert getattr(found, name) == value


def test_a_byte_order_mark_before_a_body_is_skipped() -> None:
    assert known(CompletionRequest, b'\xef\xbb\xbf{"prompt": "a", "x": 1}').unknown == ["x"]


UNKNOWN = {
    "temprature": 1, "loudness": {"a": [1]}, "quiet": None,
    "stream_options": {"include_usage": False, "every": 3},
    "response_format": {"type": "json_schema", "x": 1,
                        "json_schema": {"schema": {"type": "object", "title": "kept"}, "y": 2}},
}  # fmt: skip


def test_unknown_fields_are_named_with_their_paths_and_left_out() -> None:
    body = {"messages": [{"role": "user", "content": "a", "custom": 1}], "seed": 7} | UNKNOWN
    found = known(ChatRequest, json.dumps(body).encode())
    assert found.unknown == ["temprature", "loudness", "stream_options.every", "response_format.x",
                             "response_format.json_schema.y"]  # fmt: skip
    assert found.request.seed == 7
    assert found.request.messages[0]["custom"] == 1, "messages belong to the template"
    left = json.loads(found.body)
    assert left["response_format"]["json_schema"]["schema"]["title"] == "kept"
    assert not {"temprature", "loudness", "quiet"} & left.keys()


def test_unknown_fields_are_logged_once_and_told_in_a_header_or_refused() -> None:
    logged: list[str] = []
    warns = UnknownFields("warn", lambda _, name: logged.append(name))
    for _ in range(3):
        assert warns.judge(["a", "b.c"]) == {HEADER: "a, b.c"}
    assert logged == ["a", "b.c"]
    assert warns.judge([]) == {}
    with pytest.raises(APIError, match="Unknown field b"):
        UnknownFields("refuse", lambda *_: None).judge(["b"])
    for number in range(2000):
        warns.judge([f"x{number}"])
    assert len(logged) == UnknownFields.MAX_LOGGED


def test_a_hostile_name_breaks_neither_header_nor_log() -> None:
    value = header_value(["a\r\nSet-Cookie: x", "é" * 500, "", *(f"n{i}" for i in range(99))])
    assert value.isascii()
    assert value.isprintable()
    assert len(value) < 2000
    assert value.endswith("more")
