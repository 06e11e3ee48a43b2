"""What a worker is sent: the client's body, or one that goes on where a stream broke off."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from pigou.gateway.call import CHAT, COMPLETIONS, Body, Call
from pigou.gateway.transcript import Transcript

#: What a stock worker needs of a request besides prompt and limits, to go on with it.
_CARRIED = ("model", "stream", "stream_options", "temperature", "top_p", "top_k", "min_p", "seed",
            "stop_token_ids", "ignore_eos", "logit_bias", "skip_special_tokens",
            "spaces_between_special_tokens", "cache_salt", "priority", "return_token_ids",
            "user")  # fmt: skip

#: What a frontend of Dynamo calls the token ids of a chunk.
DYNAMO_IDS = "completion_token_ids"


@dataclass(frozen=True, slots=True)
class Sending:
    """A body and where to send it.

    Attributes:
        path: route.
        body: JSON object.
        mapped: a chat goes on as a completion.
    """

    path: str
    body: Body
    mapped: bool = False


def can_resume(call: Call, transcript: Transcript, stock: bool) -> bool:
    """Whether a broken stream can go on without the client noticing.

    A stream of which the client has seen nothing always can. One that has begun needs the ids of
    its prompt; on a stock worker, nothing may depend on what came before but the tokens (stop
    strings, penalties, a grammar, a seed's generator), nor may the client count on exact ids.
    """
    if not transcript.begun:
        return True
    if not call.single:
        return False
    if not transcript.tokens:
        return True
    if not transcript.prompt:
        return False
    return call.portable if stock else True


def sending(
    call: Call, transcript: Transcript, *, stock: bool, seed: int, max_model_len: int,
    dynamo: bool = False,
) -> Sending:  # fmt: skip
    """Return what to send for the next attempt; first or not.

    Args:
        call: the client's request.
        transcript: what the client was told; `can_resume` holds. On a stock worker, tokens that
            were not shown entirely are dropped from it: the worker makes them again, so that no
            character is cut in two.
        stock: the worker knows nothing of `resume_tokens`.
        seed: used on Pigou's workers where the client gave none, so that a sampled stream goes
            on with the draws that it would have had.
        max_model_len: context of the worker, in tokens.
        dynamo: the worker is a frontend of Dynamo, which tells token ids in its own way.
    """
    body = call.body if stock or call.seeded else {**call.body, "seed": seed}
    if dynamo and call.stream and not call.wants_ids:
        body = _dynamo(body)
    if stock:
        del transcript.tokens[transcript.shown :]
    if not transcript.tokens:
        return Sending(call.path, body)
    prompt = transcript.prompt_ids()
    ids = prompt + transcript.tokens
    generated = len(transcript.tokens)
    if not stock:
        where = "prompt_token_ids" if call.chat else "prompt"
        return Sending(call.path, {**body, where: ids, "resume_tokens": generated})
    rest: Body = {name: body[name] for name in _CARRIED if name in body}
    room = max_model_len - len(prompt) if max_model_len else call.max_tokens
    most = _number(body, "max_completion_tokens") if call.chat else None
    most = most or _number(body, "max_tokens") or (room if call.chat else 16)
    rest |= {
        "prompt": ids,
        "max_tokens": min(most, room) - generated,
        "min_tokens": max(0, (_number(body, "min_tokens") or 0) - generated),
    }
    return Sending(COMPLETIONS, rest, mapped=call.path == CHAT)


def _dynamo(body: Body) -> Body:
    """Return a body that asks Dynamo for the token ids: it refuses fields that it does not know."""
    found = {name: value for name, value in body.items() if name != "return_token_ids"}
    extension = found.get("nvext", {})
    if isinstance(extension, msgspec.Raw):
        extension = msgspec.json.decode(extension)
    if not isinstance(extension, dict):
        return found  # Dynamo says what is wrong with it
    fields = extension.get("extra_fields") or []
    if DYNAMO_IDS not in fields:
        extension = {**extension, "extra_fields": [*fields, DYNAMO_IDS]}
    return {**found, "nvext": extension}


def _number(body: Body, name: str) -> int | None:
    value = body.get(name)
    if isinstance(value, msgspec.Raw):
        return msgspec.json.decode(value, type=int | None, strict=False)
    return value
