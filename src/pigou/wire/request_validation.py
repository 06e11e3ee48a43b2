"""Checks of request fields that need neither tokenizer nor model; errors name field and remedy.

Lengths of lists are bounded by `pigou.wire.json_limits`, before a body is decoded.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Mapping
from typing import Any

import msgspec

from pigou.kv.tenure import salt_expiry
from pigou.wire.errors import bad_field, bad_request, check_count
from pigou.wire.openai_requests import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    PoolingRequest,
)
from pigou.wire.structured_output import grammar

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOPS = 16
#: Maximum characters of a stop string: a prefix is held back, and compared at each token.
MAX_STOP_LENGTH = 1024
MAX_SALT = 128
#: Fields of messages that the model cannot read, and what to do instead.
_REFUSED_IN_MESSAGES = {
    "audio": "the model reads text only; send its transcript as content",
    "function_call": "it is deprecated; use tool_calls",
}
_MAX_INT = 2**31 - 1
#: Least and greatest values by field.
_BOUNDS: Mapping[str, tuple[float, float]] = {
    "n": (1, MAX_N), "min_tokens": (0, _MAX_INT), "temperature": (0.0, 2.0),
    "top_k": (-1, _MAX_INT), "min_p": (0.0, 1.0), "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0), "seed": (-(2**63), 2**63 - 1),
    "prompt_logprobs": (0, MAX_LOGPROBS), "priority": (-(2**31), _MAX_INT),
    "deadline_ms": (0, _MAX_INT), "truncate_prompt_tokens": (1, _MAX_INT),
}  # fmt: skip
_SALT_FORBIDS = "@/\\\0"
#: Request id header, echoed in the reply.
REQUEST_ID_HEADER = "X-Request-Id"
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,256}")


def check(request: GenerationRequest) -> None:
    """Raise `APIError` 400 for the first invalid field."""
    _check_numbers(request)
    _check_stream(request)
    _check_stops(request)
    if request.cache_salt is not None:
        _check_salt(request.cache_salt)
    _check_resume(request)
    grammar(request)
    if isinstance(request, ChatRequest):
        _check_chat(request)
    elif isinstance(request, CompletionRequest):
        if not isinstance(request.logprobs, bool):
            _within(request, "logprobs", 0, MAX_LOGPROBS)
        prompts(request)


def prompts(request: CompletionRequest) -> list[str | list[int]]:
    """Return the prompts, each text or token ids; raise `APIError` 400 when there is none."""
    prompt = request.prompt
    if isinstance(prompt, str):
        parsed: list[str | list[int]] = [prompt]
    elif prompt and isinstance(prompt[0], int):
        parsed = [_ids(prompt)]
    elif prompt and isinstance(prompt[0], str):
        if not all(isinstance(item, str) for item in prompt):
            raise _mixed()
        parsed = [item for item in prompt if isinstance(item, str)]
    else:
        parsed = [_ids(item) for item in prompt]
    if not parsed or any(not item for item in parsed):
        raise bad_field("prompt", "is empty: send text or token ids.")
    return parsed


def scores_only(request: GenerationRequest) -> bool:
    """Return whether the prompt is scored or pooled, and nothing generated."""
    return isinstance(request, PoolingRequest) or (
        isinstance(request, CompletionRequest)
        and request.max_tokens == 0
        and (bool(request.echo) or request.prompt_logprobs is not None)
    )


def stops(request: GenerationRequest) -> tuple[str, ...]:
    """Return the stop strings."""
    if request.stop is None:
        return ()
    return (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)


def _check_numbers(request: GenerationRequest) -> None:
    _within(request, "max_tokens", 0 if scores_only(request) else 1, _MAX_INT)
    for name, (minimum, maximum) in _BOUNDS.items():
        _within(request, name, minimum, maximum)
    _above_zero(request, "top_p", 1.0)
    _above_zero(request, "repetition_penalty", 1e6)
    for token in request.stop_token_ids or ():
        if not 0 <= token < 2**31:
            raise bad_field("stop_token_ids", f"has {token}, which is no token id.")
    for key, bias in (request.logit_bias or {}).items():
        if not key.isascii() or not key.isdigit() or len(key) > 9:
            raise bad_field("logit_bias", f"has the key {key[:40]!r}; keys are token ids.")
        if not -100 <= bias <= 100:
            raise bad_field(f"logit_bias[{key}]", f"is {bias}; it must be in [-100, 100].")


def _check_stream(request: GenerationRequest) -> None:
    options = request.stream_options
    if options is not None and options.include_obfuscation:
        raise bad_field(
            "stream_options.include_obfuscation",
            "is refused: streams are not padded; set it to false, or remove it.",
        )
    asks = options is not None and (options.include_usage or options.continuous_usage_stats)
    if asks and not request.stream:
        raise bad_field(
            "stream_options", "is given without stream: set stream to true, or remove it."
        )
    if request.stream and request.prompt_logprobs is not None:
        raise bad_field("prompt_logprobs", "does not travel in a stream: set stream to false.")


def _check_stops(request: GenerationRequest) -> None:
    strings = stops(request)
    if "" in strings:
        raise bad_field("stop", "holds an empty string: remove it.")
    check_count("stop", len(strings), MAX_STOPS, "strings")
    if (max_length := max(map(len, strings), default=0)) > MAX_STOP_LENGTH:
        raise bad_field(
            "stop", f"has a string of {max_length} characters; at most {MAX_STOP_LENGTH} work."
        )


def _check_salt(salt: str) -> None:
    if not 1 <= len(salt) <= MAX_SALT or any(char in salt for char in _SALT_FORBIDS):
        raise bad_field(
            "cache_salt",
            f"must have 1 to {MAX_SALT} characters, none of them '@', '/', '\\' or NUL.",
        )
    try:
        salt_expiry(salt)
    except ValueError as error:
        raise bad_field("cache_salt", f"is {salt!r}; {error}.") from None


def _check_resume(request: GenerationRequest) -> None:
    _within(request, "resume_tokens", 0, _MAX_INT)
    if not request.resume_tokens:
        return
    if (request.n or 1) != 1:
        raise bad_field("resume_tokens", "continues one stream: set n to 1.")
    if isinstance(request, CompletionRequest):
        texts = [item for item in prompts(request) if isinstance(item, str)]
        if texts or len(prompts(request)) != 1:
            raise bad_field("resume_tokens", "needs one prompt of token ids.")
    elif isinstance(request, ChatRequest) and request.prompt_token_ids is None:
        raise bad_field("resume_tokens", "needs prompt_token_ids.")


def _check_chat(request: ChatRequest) -> None:
    _within(request, "max_completion_tokens", 1, 2**31 - 1)
    _within(request, "top_logprobs", 0, MAX_LOGPROBS)
    if request.top_logprobs and not request.logprobs:
        raise bad_field("top_logprobs", "is given without logprobs: set logprobs to true.")
    if request.prompt_token_ids is not None:
        if not request.prompt_token_ids:
            raise bad_field("prompt_token_ids", "is empty: remove it.")
        _ids(request.prompt_token_ids, "prompt_token_ids")
    check_messages(request.messages)
    if request.add_generation_prompt is not False and request.continue_final_message:
        raise bad_field("continue_final_message", "needs add_generation_prompt to be false.")


def check_messages(messages: list[dict[str, Any]]) -> None:
    """Raise `APIError` 400 unless these are chat messages of text."""
    if not messages:
        raise bad_field("messages", "is empty: send at least one message.")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message.get("role"), str):
            raise bad_field(f"{where}.role", "is missing or not a string.")
        _check_message(message, where)
        content = message.get("content")
        if content is None or isinstance(content, str):
            continue
        if not isinstance(content, list):
            raise bad_field(f"{where}.content", "must be text or a list of parts.")
        for part in content:
            _check_part(part, where)


def _check_message(message: Mapping[str, Any], where: str) -> None:
    """Refuse fields that no template shows: they would be lost in silence."""
    if message["role"] == "function":
        raise bad_field(f"{where}.role", "is 'function', which is deprecated; use tool.")
    for name, remedy in _REFUSED_IN_MESSAGES.items():
        if message.get(name) is not None:
            raise bad_field(f"{where}.{name}", f"is refused: {remedy}.")


def _check_part(part: Any, where: str) -> None:
    if isinstance(part, str):
        return
    if not isinstance(part, Mapping) or part.get("type") not in ("text", "input_text", "refusal"):
        kind = part.get("type") if isinstance(part, Mapping) else part
        raise bad_field(
            f"{where}.content", f"has a part of type {str(kind)[:40]!r}; the model reads text only."
        )
    if not isinstance(part.get("refusal" if part["type"] == "refusal" else "text"), str):
        raise bad_field(f"{where}.content", "has a text part without text.")


def _within(request: msgspec.Struct, name: str, minimum: float, maximum: float) -> None:
    value = getattr(request, name)
    if value is not None and not (minimum <= value <= maximum):
        raise bad_field(name, f"is {value}; it must be in [{minimum}, {maximum}].")


def _above_zero(request: msgspec.Struct, name: str, maximum: float) -> None:
    value = getattr(request, name)
    if value is not None and not (0 < value <= maximum and math.isfinite(value)):
        raise bad_field(name, f"is {value}; it must be in (0, {maximum:g}].")


def _ids(items: Any, name: str = "prompt") -> list[int]:
    if not isinstance(items, list):
        raise _mixed()
    # Three passes in C: a loop takes several times as long, and there may be a million ids.
    if set(map(type, items)) - {int}:
        raise _mixed()
    for item in (min(items, default=0), max(items, default=0)):
        if not 0 <= item < 2**31:
            raise bad_field(name, f"has the token id {item}, which is out of vocabulary.")
    return items


def _mixed() -> Exception:
    return bad_field(
        "prompt", "mixes kinds: it must be text, a list of texts, token ids, or a list of those."
    )


def new_request_id() -> str:
    """Return a new request id."""
    return secrets.token_hex(8)


def request_id(header: str | None, field: str | None) -> str:
    """Return a request's id: of its header, else its body, else a new one. Raises APIError 400."""
    given = header or field
    if given is None:
        return new_request_id()
    if not _REQUEST_ID.fullmatch(given):
        raise bad_request(
            f"The request id {given[:60]!r} must have 1 to 256 printable ASCII characters, and no "
            "spaces.",
            "request_id",
        )
    return given


def reply_id(header: str | None) -> str:
    """Return the reply's id: the client's own if it is valid, else a new one."""
    return header if header is not None and _REQUEST_ID.fullmatch(header) else new_request_id()
