"""Migration: body of a request's next attempt, which continues its stream elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from pigou.gateway.request import CHAT, COMPLETIONS, Body, GatewayRun
from pigou.lifecycle.migration import Continuation, StreamState

#: Fields that a stock worker needs to continue a request, besides prompt and limits.
_CARRIED = ("model", "stream", "stream_options", "temperature", "top_p", "top_k", "min_p", "seed",
            "stop_token_ids", "ignore_eos", "logit_bias", "skip_special_tokens",
            "spaces_between_special_tokens", "cache_salt", "priority", "return_token_ids",
            "user")  # fmt: skip

#: Dynamo's name for the token ids of a chunk.
DYNAMO_IDS = "completion_token_ids"


@dataclass(frozen=True, slots=True)
class AttemptBody:
    """A body and its route."""

    path: str
    body: Body  # JSON object
    mapped: bool = False  # True for a chat continued as a completion


def attempt_body(
    run: GatewayRun, state: StreamState, *, stock: bool, max_model_len: int,
    dynamo: bool = False,
) -> AttemptBody:  # fmt: skip
    """Return the body for the next attempt, first or not; needs `can_migrate`.

    `stock` workers do not know `resume_tokens`, `dynamo` frontends report token ids in their own
    way; `max_model_len` is in tokens.
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
    """Return a body that asks Dynamo for token ids; it rejects unknown fields."""
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
