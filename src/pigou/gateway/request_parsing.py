"""Parses a client's body into a `ParsedRequest`, or an error that names the fault."""

from __future__ import annotations

import math
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import msgspec

from pigou.gateway.proxy.reply_parsing import ABSENT, given
from pigou.gateway.request import Body, BodyFields, ParsedRequest
from pigou.kv.tenure import Tenure
from pigou.request import NEVER
from pigou.wire.errors import APIError, bad_request, decoded
from pigou.wire.json_limits import read_fields
from pigou.wire.openai_requests import ChatRequest, CompletionRequest, Known, known, without_bom
from pigou.wire.request_validation import check
from pigou.wire.request_validation import request_id as wire_id

#: Bytes of text that make a token, as a guess.
_BYTES_PER_TOKEN = 4
_DEFAULT_COMPLETION_TOKENS = 16
_DEFAULT_CHAT_TOKENS = 256
#: Fields that are the gateway's to fill in, and what to do instead.
_RESERVED = {
    "kv_transfer_params": "the gateway makes transfers itself; remove it",
    "resume_tokens": "the gateway resumes streams itself; remove it",
}
#: Fields whose meaning for a migrated reply is known.
_KNOWN = set(CompletionRequest.__struct_fields__) | set(ChatRequest.__struct_fields__)


_body_fields = msgspec.json.Decoder(BodyFields, strict=False)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_raw_list = msgspec.json.Decoder(list[msgspec.Raw] | None)
#: The tenure of a request of which nothing is known or said.
NOTHING = Tenure()
ROUTING_HEADER = "X-Pigou-Routing"
#: Names degraded modes in a reply; `never` in a request forbids them.
DEGRADED_HEADER, _NEVER = "x-pigou-degraded", "never"
#: Pigou's headers of requests, beside those of a tenure.
_HEADERS = frozenset({
    "x-pigou-cache", "x-pigou-class", "x-pigou-degraded", "x-pigou-fleet-nonce",
    "x-pigou-fleet-proof", "x-pigou-fleet-tenant", "x-pigou-overflow", "x-pigou-prefix-advice",
    "x-pigou-routing", "x-pigou-session",
})  # fmt: skip
_OVERRIDE_NAME = re.compile(r"[A-Za-z_]\w{0,63}", re.ASCII)
_MAX_OVERRIDES = 32


@dataclass(frozen=True, slots=True)
class ServerScope:
    """The gateway's part of a request's tenure."""

    model: str = ""
    release: str = ""  # the gateway's own; empty for none
    releases: frozenset[str] = frozenset()
    template: str = ""  # digest of the model's chat template; empty where it is not known here
    aliases: frozenset[str] = frozenset()  # all names of that model

    def extend(self, tenure: Tenure, fields: BodyFields, body: Body, *, chat: bool) -> Tenure:
        """Return a request's tenure, from its key and headers, its body, and this gateway."""
        own_tenure = replace(tenure, cache_salt=fields.cache_salt or "")
        if own_tenure == Tenure() and not self.release:
            return own_tenure
        return self.whole(own_tenure, fields, body, chat=chat)

    def whole(self, tenure: Tenure, fields: BodyFields, body: Body, *, chat: bool) -> Tenure:
        """Return the tenure with model, release, template and tools, as caches of answers need."""
        own_tenure = replace(tenure, cache_salt=fields.cache_salt or "")
        template, named = "", fields.model
        if chat:
            own = fields.chat_template
            known = isinstance(own, str)
            template = digest(own.encode("utf-8", "surrogatepass")) if known else self.template
        return replace(
            own_tenure,
            model=self.model if named is None or named in self.aliases else named,
            release=_packed(self.release, *sorted(self.releases)) + own_tenure.release,
            template=_packed(template) + own_tenure.template,
            tools=frozenset(f"stated:{name}" for name in own_tenure.tools) | _schemas(body),
        )


def digest(text: bytes) -> str:
    """Return a digest of a long text, 32 hexadecimal digits."""
    return blake2b(text, digest_size=16).hexdigest()


def check_headers(headers: Mapping[str, str]) -> None:
    """Raise `APIError` 400 for an unknown `X-Pigou-` header, or an unknown degraded mode."""
    for name, value in headers.items():
        lower = name.lower()
        if not lower.startswith("x-pigou-") or lower.startswith("x-pigou-tenure"):
            continue
        if lower not in _HEADERS:
            names = ", ".join(sorted(n for n in _HEADERS if "-fleet-" not in n))
            raise bad_request(f"{name[:60]} is no request header; these are: {names}.", name[:60])
        if lower == DEGRADED_HEADER and value != _NEVER:
            raise bad_request(f"{lower} is {value[:40]!r}; it may be {_NEVER}.", lower)


@lru_cache(maxsize=4096)
def salt(tenure: Tenure) -> str:
    """Return `Tenure.salt`, cached."""
    return tenure.salt()


def _packed(*parts: str) -> str:
    return f"{len(parts)};" + "".join(f"{len(part)}:{part}" for part in parts)


def _schemas(body: Body) -> frozenset[str]:
    raw = body.get("tools")
    if not isinstance(raw, msgspec.Raw):
        return frozenset()
    return frozenset(f"schema:{digest(bytes(tool))}" for tool in _raw_list.decode(raw) or ())


NO_SCOPE = ServerScope()


def read(
    data: bytes, *, chat: bool, strict: bool, tenure: Tenure = NOTHING,
    scope: ServerScope = NO_SCOPE, request_id: str | None = None,
    overrides: Mapping[str, float] | None = None, context: int = 0, model: str = "",
    adapter: Callable[[str | None], str] = lambda _: "",
) -> ParsedRequest:  # fmt: skip
    """Parse a body, a large one on a thread (`json_limits.SMALL`); raises APIError 400.

    `strict` refuses what Pigou's workers refuse, and drops unknown fields. `context` is in tokens,
    0 if unknown; `model` replaces the name sent to workers; `adapter` maps names of adapters.
    """
    arrival = time.monotonic_ns()
    data = without_bom(data)
    body: Body = dict(read_fields(data, context))
    fields = decoded(_body_fields, data)
    for name, remedy in _RESERVED.items():
        if given(body.get(name, ABSENT)):
            raise bad_request(f"{name} is refused: {remedy}.", name)
    if fields.cache_salt == "":
        raise bad_request("cache_salt is empty: leave it out, or send a text.", "cache_salt")
    unknown: list[str] = []
    if strict:
        request: Known[Any] = known(ChatRequest if chat else CompletionRequest, data)
        check(request.request)
        unknown = request.unknown
        if request.body is not data:
            body = dict(_fields.decode(request.body))
    if model:
        fields.model, body["model"] = model, msgspec.Raw(msgspec.json.encode(model))
    prompts, tokens = (1, _chat_size(fields)) if chat else _prompt_size(fields.prompt)
    choices = max(1, fields.n or 1)
    single, stream = prompts == 1 and choices == 1, bool(fields.stream)
    wanted = fields.max_completion_tokens or fields.max_tokens
    portable = _portable(fields, body)
    body.pop("request_id", None)
    if stream:
        body["return_token_ids"] = True
    whole, cache_salt = scope.extend(tenure, fields, body, chat=chat), ""
    if whole != NOTHING:
        cache_salt = body["cache_salt"] = salt(whole)
    return ParsedRequest(
        id=secrets.token_hex(16),
        wire_id=wire_id(request_id, fields.request_id),
        chat=chat,
        stream=stream,
        body=body,
        fields=fields,
        prompt_tokens=max(1, tokens),
        max_tokens=wanted or (_DEFAULT_CHAT_TOKENS if chat else _DEFAULT_COMPLETION_TOKENS),
        single=single,
        splits=single and not fields.scores_prompt(chat),
        portable=portable,
        seeded=fields.seed is not None,
        wants_ids=bool(fields.return_token_ids),
        wants_usage=fields.stream_options is not None and bool(fields.stream_options.include_usage),
        tenant=tenure.tenant,
        priority=fields.priority or 0,
        deadline_ms=fields.deadline_ms,
        arrival=arrival,
        salt=cache_salt,
        expiry=whole.expiry if cache_salt else NEVER,
        overrides=overrides or {},
        unknown=unknown,
        choices=choices,
        prompts=fields.prompt if prompts > 1 else (None if chat else first_prompt(fields.prompt),),
        adapter=adapter(fields.model),
    )


def _prompt_size(prompt: Any) -> tuple[int, int]:
    """Return the number of prompts and their tokens."""
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


def first_prompt(prompt: Any) -> Any:
    """Return the first of several prompts, or the only one."""
    is_list = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    return prompt[0] if is_list else prompt


def _chat_size(fields: BodyFields) -> int:
    if fields.prompt_token_ids:
        return len(fields.prompt_token_ids)
    if not given(fields.messages):
        raise bad_request("messages is required, and missing.", "messages")
    return len(memoryview(fields.messages)) // _BYTES_PER_TOKEN


def _portable(fields: BodyFields, body: Body) -> bool:
    """True if the reply depends only on the prompt and tokens so far."""
    return body.keys() <= _KNOWN and not (
        fields.stop
        or fields.presence_penalty
        or fields.frequency_penalty
        or fields.repetition_penalty not in (None, 1.0)
        or fields.logprobs not in (None, False)
        or fields.prompt_logprobs is not None
        or fields.echo
        or fields.tools
        or fields.structured_outputs is not None
        or (fields.response_format is not None and fields.response_format.type != "text")
        or (fields.seed is not None and fields.temperature != 0)
    )


def read_overrides(text: str | None) -> dict[str, float]:
    """Parse `name=number,...` (`temperature=0.7,overlap_weight=2`); raises APIError 400."""
    if text is None:
        return {}
    items = text.split(",")
    if len(items) > _MAX_OVERRIDES:
        raise bad_request(
            f"{ROUTING_HEADER} has {len(items)} items; at most {_MAX_OVERRIDES} are read.",
            ROUTING_HEADER,
        )
    overrides: dict[str, float] = {}
    for item in items:
        name, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not _OVERRIDE_NAME.fullmatch(name):
            raise bad_request(
                f"{ROUTING_HEADER} has {item.strip()[:60]!r}; write name=number, several with "
                "commas.",
                ROUTING_HEADER,
            )
        if name in overrides:
            raise bad_request(f"{ROUTING_HEADER} has {name} twice; keep one.", ROUTING_HEADER)
        overrides[name] = _number(name, value)
    return overrides


def overrides_refused(why: Exception) -> APIError:
    """Return the error for overrides refused by the routing policy."""
    return bad_request(f"{ROUTING_HEADER}: {why}.", ROUTING_HEADER)


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise bad_request(
            f"{ROUTING_HEADER} has {name}={text[:40]!r}; it must be a number.", ROUTING_HEADER
        )
    return value
