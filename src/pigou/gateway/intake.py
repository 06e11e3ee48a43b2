"""The intake: from a client's body to a `Call`, or to an error that says what is wrong."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from pigou.gateway.asked import Asked
from pigou.gateway.call import Body, Call
from pigou.gateway.chunks import ABSENT, given
from pigou.gateway.facts import Facts, salt
from pigou.kv.tenure import Tenure
from pigou.wire.errors import bad_request, decode_error
from pigou.wire.json_limits import read_fields
from pigou.wire.openai_requests import (
    ChatRequest,
    CompletionRequest,
    known_chat,
    known_completion,
    without_bom,
)
from pigou.wire.request_id import request_id as wire_id
from pigou.wire.request_validation import check

#: Bytes of text that make a token, as a guess.
_BYTES_PER_TOKEN = 4
_COMPLETION_TOKENS = 16
_CHAT_TOKENS = 256
#: Fields that are the gateway's to fill in, and what to do instead.
_RESERVED = {
    "kv_transfer_params": "the gateway makes transfers itself; remove it",
    "resume_tokens": "the gateway resumes streams itself; remove it",
}
#: Fields whose meaning for a reply that goes on is known.
_KNOWN = set(CompletionRequest.__struct_fields__) | set(ChatRequest.__struct_fields__)


#: The tenure of a request of which nothing is known or said.
NOTHING = Tenure()
NO_FACTS = Facts()

_asked = msgspec.json.Decoder(Asked, strict=False)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def read(
    data: bytes, *, chat: bool, strict: bool, tenure: Tenure = NOTHING, facts: Facts = NO_FACTS,
    request_id: str | None = None, overrides: Mapping[str, float] | None = None,
    context: int = 0,
) -> Call:  # fmt: skip
    """Read a body; a large one is to be read on a thread (`pigou.wire.json_limits.SMALL`).

    Args:
        data: as the client sent it.
        chat: whether it came to the chat route.
        strict: refuse what Pigou's own workers would refuse, and leave out fields that they do
            not know; otherwise the workers judge.
        tenure: of its key and headers.
        facts: that the gateway adds to it.
        request_id: the client's `X-Request-Id`.
        overrides: of the routing policy's parameters, for this request.
        context: tokens that the model can hold; 0 where that is not known.

    Raises:
        APIError: 400, naming field and remedy.
    """
    arrival = time.monotonic_ns()
    data = without_bom(data)
    body: Body = dict(read_fields(data, context))
    try:
        asked = _asked.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise decode_error(error, data) from None
    for name, remedy in _RESERVED.items():
        if given(body.get(name, ABSENT)):
            raise bad_request(f"{name} is refused: {remedy}.", name)
    if asked.cache_salt == "":
        raise bad_request("cache_salt is empty: leave it out, or send a text.", "cache_salt")
    unknown: list[str] = []
    if strict:
        known = known_chat(data) if chat else known_completion(data)
        check(known.request)
        unknown = known.unknown
        if known.body is not data:
            body = dict(_fields.decode(known.body))
    call = _call(asked, body, chat)
    call.unknown = unknown
    call.arrival, call.tenant, call.wire_id = (
        arrival,
        tenure.tenant,
        wire_id(request_id, asked.request_id),
    )
    if overrides:
        call.overrides = overrides
    whole = facts.joined(tenure, asked, body, chat=chat)
    if whole != NOTHING:
        call.salt, call.expiry = salt(whole), whole.expiry
        body["cache_salt"] = call.salt
    return call


def _call(asked: Asked, body: Body, chat: bool) -> Call:
    prompts, tokens = (1, _chat_size(asked)) if chat else _prompt_size(asked.prompt)
    choices = max(1, asked.n or 1)
    single = prompts == 1 and choices == 1
    stream = bool(asked.stream)
    wanted = asked.max_completion_tokens or asked.max_tokens
    call = Call(
        id=secrets.token_hex(16),
        wire_id="",
        chat=chat,
        stream=stream,
        body=body,
        prompt=max(1, tokens),
        max_tokens=wanted or (_CHAT_TOKENS if chat else _COMPLETION_TOKENS),
        single=single,
        splits=single and not asked.scores_prompt(chat),
        portable=_portable(asked, body),
        seeded=asked.seed is not None,
        wants_ids=bool(asked.return_token_ids),
        wants_usage=asked.stream_options is not None and bool(asked.stream_options.include_usage),
        priority=asked.priority or 0,
        deadline_ms=asked.deadline_ms,
        asked=asked,
        choices=choices,
        prompts=asked.prompt if prompts > 1 else (None,) if chat else _prompts(asked.prompt),
    )
    body.pop("request_id", None)
    if stream:
        body["return_token_ids"] = True
    return call


def _prompt_size(prompt: Any) -> tuple[int, int]:
    """Return how many prompts there are, and the tokens of all."""
    if isinstance(prompt, str):
        return 1, len(prompt) // _BYTES_PER_TOKEN
    if not isinstance(prompt, list) or not prompt:
        raise bad_request("prompt is missing: send text or token ids.", "prompt")
    if isinstance(prompt[0], int):
        return 1, len(prompt)
    sizes = [
        len(item) // (_BYTES_PER_TOKEN if isinstance(item, str) else 1)
        for item in prompt
        if isinstance(item, str | list)
    ]
    return len(prompt), sum(sizes)


def _prompts(prompt: Any) -> tuple[Any, ...]:
    """Return the one prompt of a request, out of its list if it is in one."""
    alone = isinstance(prompt, list) and not isinstance(prompt[0], int)
    return (prompt[0] if alone else prompt,)


def _chat_size(asked: Asked) -> int:
    if asked.prompt_token_ids:
        return len(asked.prompt_token_ids)
    if not given(asked.messages):
        raise bad_request("messages is required, and missing.", "messages")
    return len(memoryview(asked.messages)) // _BYTES_PER_TOKEN


def _portable(asked: Asked, body: Body) -> bool:
    """Whether prompt and tokens so far are all that the rest of the reply depends on.

    A field that the gateway does not know may mean anything, so it makes a request unportable.
    """
    return body.keys() <= _KNOWN and not (
        asked.stop
        or asked.presence_penalty
        or asked.frequency_penalty
        or asked.repetition_penalty not in (None, 1.0)
        or asked.logprobs not in (None, False)
        or asked.prompt_logprobs is not None
        or asked.echo
        or asked.tools
        or asked.structured_outputs is not None
        or (asked.response_format is not None and asked.response_format.type != "text")
        or (asked.seed is not None and asked.temperature != 0)
    )
