"""Stream migration over SSE: the next worker's body, and how its chunks continue the stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from pigou.gateway.request import CHAT, COMPLETIONS, Body, GatewayRun
from pigou.lifecycle.migration import Continuation, StreamState
from pigou.wire.sse import DONE, frame

#: What a stock worker needs of a request besides prompt and limits, to go on with it.
_CARRIED = ("model", "stream", "stream_options", "temperature", "top_p", "top_k", "min_p", "seed",
            "stop_token_ids", "ignore_eos", "logit_bias", "skip_special_tokens",
            "spaces_between_special_tokens", "cache_salt", "priority", "return_token_ids",
            "user")  # fmt: skip

_CHUNK = "chat.completion.chunk"
_DETAILS, _CACHED = "prompt_tokens_details", "cached_tokens"
#: What a frontend of Dynamo calls the token ids of a chunk.
DYNAMO_IDS = "completion_token_ids"


@dataclass(frozen=True, slots=True)
class AttemptBody:
    """A body and where to send it."""

    path: str
    body: Body  # JSON object
    mapped: bool = False  # a chat goes on as a completion


def attempt_body(
    run: GatewayRun, state: StreamState, *, stock: bool, max_model_len: int,
    dynamo: bool = False,
) -> AttemptBody:  # fmt: skip
    """Return what to send for the next attempt; first or not.

    Args:
        state: `can_migrate` holds; for a stock worker, all its tokens were shown entirely.
        stock: the worker knows nothing of `resume_tokens`.
        max_model_len: context of the worker, in tokens.
        dynamo: the worker is a frontend of Dynamo, which tells token ids in its own way.
    """
    body = run.body if stock or run.parsed.seeded else {**run.body, "seed": run.parsed.own_seed}
    if dynamo and run.parsed.stream and not run.parsed.wants_ids:
        body = _dynamo(body)
    if not state.tokens:
        return AttemptBody(run.parsed.path, body)
    prompt = state.prompt_ids()
    ids = prompt + state.tokens
    generated = len(state.tokens)
    if not stock:
        where = "prompt_token_ids" if run.parsed.chat else "prompt"
        return AttemptBody(run.parsed.path, {**body, where: ids, "resume_tokens": generated})
    rest: Body = {name: body[name] for name in _CARRIED if name in body}
    context_left = max_model_len - len(prompt) if max_model_len else run.parsed.max_tokens
    max_output_tokens = _number(body, "max_completion_tokens") if run.parsed.chat else None
    max_output_tokens = (
        max_output_tokens
        or _number(body, "max_tokens")
        or (context_left if run.parsed.chat else 16)
    )
    min_tokens = _number(body, "min_tokens") or 0
    left = Continuation.after(
        generated, len(prompt), min(max_output_tokens, context_left), min_tokens
    )
    rest |= {"prompt": ids, "max_tokens": left.max_tokens, "min_tokens": left.min_tokens}
    return AttemptBody(COMPLETIONS, rest, mapped=run.parsed.path == CHAT)


def _dynamo(body: Body) -> Body:
    """Return a body that asks Dynamo for the token ids: it refuses fields that it does not know."""
    dynamo_body = {name: value for name, value in body.items() if name != "return_token_ids"}
    extension = dynamo_body.get("nvext", {})
    if isinstance(extension, msgspec.Raw):
        extension = msgspec.json.decode(extension)
    if not isinstance(extension, dict):
        return dynamo_body  # Dynamo says what is wrong with it
    fields = extension.get("extra_fields") or []
    if DYNAMO_IDS not in fields:
        extension = {**extension, "extra_fields": [*fields, DYNAMO_IDS]}
    return {**dynamo_body, "nvext": extension}


def _number(body: Body, name: str) -> int | None:
    value = body.get(name)
    if isinstance(value, msgspec.Raw):
        return msgspec.json.decode(value, type=int | None, strict=False)
    return value


class MigratedChunks:
    """Makes the chunks of a later attempt fit what the client saw of the first.

    The reply keeps its id, time and model; the role is told once; token counts cover the whole
    reply; prompt ids are not told again.
    """

    def __init__(self, run: GatewayRun, state: StreamState, mapped: bool) -> None:
        self._run = run
        self._state = state
        self._mapped = mapped

    def fit(self, payload: bytes) -> bytes:
        """Return a chunk's JSON for the client, empty where the client knows it all."""
        body: dict[str, Any] = msgspec.json.decode(payload)
        head = self._state.head
        assert head is not None
        body |= {"id": head.id, "created": head.created, "model": head.model}
        if body.get("usage") is not None:
            body["usage"] = _whole(body["usage"], self._state)
        body.pop("prompt_token_ids", None)
        choices = body.get("choices") or []
        if self._mapped:
            body["object"] = _CHUNK
            body["choices"] = choices = [self._chat(choice) for choice in choices]
        for choice in choices:
            if self._run.parsed.chat and self._says_nothing_new(choice):
                return b""
            if not self._run.parsed.wants_ids:
                choice["token_ids"] = None
            if "prompt_token_ids" in choice:
                choice["prompt_token_ids"] = None
        return msgspec.json.encode(body)

    def _says_nothing_new(self, choice: dict[str, Any]) -> bool:
        """Take the role out of a delta; return whether nothing is left."""
        delta = choice.get("delta") or {}
        if delta.pop("role", None) is None:
            return False
        says = delta.get("content") or delta.get("tool_calls")
        return not says and choice.get("finish_reason") is None

    def _chat(self, choice: dict[str, Any]) -> dict[str, Any]:
        chat_choice = {
            "index": 0,
            "delta": {"content": choice.get("text", "")},
            "logprobs": None,
            "finish_reason": choice.get("finish_reason"),
            "token_ids": choice.get("token_ids"),
        }
        if chat_choice["finish_reason"] is not None:
            chat_choice["stop_reason"] = choice.get("stop_reason")
        return chat_choice


def usage_totals(state: StreamState) -> dict[str, Any]:
    """Return the usage of the whole reply, by the gateway's own count."""
    prompt, output = len(state.prompt_ids()), len(state.tokens)
    return {"prompt_tokens": prompt, "total_tokens": prompt + output, "completion_tokens": output}


def _whole(usage_body: dict[str, Any], state: StreamState) -> dict[str, Any]:
    """Return the usage of the whole reply, with the details that its last worker reported."""
    usage = usage_totals(state)
    if _DETAILS not in usage_body:
        return usage
    details = usage_body[_DETAILS]
    if isinstance(details, dict) and isinstance(cached := details.get(_CACHED), int):
        details = details | {_CACHED: min(cached, usage["prompt_tokens"])}
    return usage | {_DETAILS: details}


def closing_frames(run: GatewayRun, state: StreamState) -> bytes:
    """Return the frames that end a stream whose last token came, but whose end did not."""
    head = state.head
    assert head is not None
    frames = []
    if run.parsed.wants_usage and not state.usage:
        body = {
            "id": head.id,
            "object": _CHUNK if run.parsed.chat else "text_completion",
            "created": head.created,
            "model": head.model,
            "choices": [],
            "usage": usage_totals(state) | {_DETAILS: {_CACHED: 0}},
        }
        frames.append(frame(msgspec.json.encode(body)))
    return b"".join([*frames, DONE])


def length_frame(run: GatewayRun, state: StreamState) -> bytes:
    """Return the chunk that says a reply ended for its length, when its last token has come."""
    head = state.head
    assert head is not None
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": "length"}
    choice |= {"delta": {"content": ""}} if run.parsed.chat else {"text": ""}
    body = {
        "id": head.id,
        "object": _CHUNK if run.parsed.chat else "text_completion",
        "created": head.created,
        "model": head.model,
        "choices": [choice | {"stop_reason": None, "token_ids": None}],
    }
    return frame(msgspec.json.encode(body))
