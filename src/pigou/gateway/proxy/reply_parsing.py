"""Parses chunks and replies of workers: the fields needed, and removal of token ids."""

from __future__ import annotations

from typing import Any

import msgspec

from pigou.lifecycle.migration import ReplyHead
from pigou.wire.json_limits import measure

#: Openings of token ids, as compact encoders write them.
TOKEN_IDS = b'"token_ids":['
PROMPT_TOKEN_IDS = b'"prompt_token_ids":['
_EXTENSION = b',"nvext":{"completion_token_ids":['
#: A field that is not there (`msgspec.Raw` cannot be optional).
ABSENT = msgspec.Raw(b"")
#: The largest integer that a float holds exactly.
_MAX_EXACT_FLOAT = 2**53
_COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")
#: Bytes of a reply of which every value may be decoded, and choices of a larger one: as Python's
#: objects a reply can be forty times as large.
_MAX_REGULAR_BYTES, _MAX_CHOICES = 2**20, 2**14


def given(raw: msgspec.Raw) -> bool:
    """True if a field is present and not null."""
    return len(memoryview(raw)) > 4 or bytes(raw) not in (b"", b"null")


class Delta(msgspec.Struct):
    """The `delta` of a chat chunk."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class ChunkChoice(msgspec.Struct):
    """Fields needed of a chunk's choice."""

    index: int = 0
    text: str = ""
    delta: Delta = msgspec.field(default_factory=Delta)
    token_ids: list[int] | None = None
    prompt_token_ids: msgspec.Raw = ABSENT
    finish_reason: str | None = None

    @property
    def shown(self) -> str:
        """Text visible to the client."""
        return self.text or self.delta.content or self.thought

    @property
    def thought(self) -> str:
        """Reasoning, by either name."""
        return self.delta.reasoning or self.delta.reasoning_content or ""


class DynamoExtension(msgspec.Struct):
    """`nvext` of a Dynamo frontend's chunk."""

    completion_token_ids: list[int] | None = None


class RelayChunk(msgspec.Struct):
    """A chunk or an error."""

    id: str = ""
    created: int = 0
    model: str = ""
    choices: list[ChunkChoice] = []
    usage: msgspec.Raw = ABSENT
    nvext: DynamoExtension | None = None
    prompt_token_ids: msgspec.Raw = ABSENT
    error: dict[str, Any] | None = None

    def head(self) -> ReplyHead:
        """Return the fields common to the stream's other chunks."""
        return ReplyHead(self.id, self.created, self.model)

    def prompt(self) -> bytes:
        """Return the prompt's ids from wherever they are; empty if absent."""
        places = [self.prompt_token_ids, *(choice.prompt_token_ids for choice in self.choices)]
        return next((bytes(raw) for raw in places if raw is not ABSENT and given(raw)), b"")


_chunk = msgspec.json.Decoder(RelayChunk).decode


def chunk(payload: bytes) -> tuple[RelayChunk, bytes]:
    """Return a chunk and its regular JSON; raise `msgspec.DecodeError`, `UnicodeDecodeError`."""
    try:
        return _chunk(payload), payload
    except msgspec.ValidationError:
        payload = msgspec.json.encode(normalized(payload))
        return _chunk(payload), payload


def without_ids(payload: bytes, prompt: bool) -> bytes:
    """Replace token ids in a chunk's JSON by null, cutting bytes where possible."""
    at = payload.find(TOKEN_IDS)
    if at < 0 and not prompt:
        return _encoded_without_ids(payload)
    while at >= 0:
        payload = payload[: at + 12] + b"null" + payload[payload.index(b"]", at) + 1 :]
        at = payload.find(TOKEN_IDS, at)
    if prompt:
        at = payload.find(PROMPT_TOKEN_IDS)
        if at < 0:
            return _encoded_without_ids(payload)
        while at >= 0:
            payload = payload[: at + 19] + b"null" + payload[payload.index(b"]", at) + 1 :]
            at = payload.find(PROMPT_TOKEN_IDS, at)
    return payload


def without_extension(payload: bytes) -> bytes:
    """Return a chunk's JSON without Dynamo's extension, if it only has token ids."""
    at = payload.rfind(_EXTENSION)
    if at < 0 or payload.find(b"]", at) != len(payload) - 3 or not payload.endswith(b"]}}"):
        return payload
    return payload[:at] + b"}"


def _encoded_without_ids(payload: bytes) -> bytes:
    body: dict[str, Any] = msgspec.json.decode(payload)
    for part in [body, *(body.get("choices") or [])]:
        for name in ("token_ids", "prompt_token_ids"):
            if part.get(name) is not None:
                part[name] = None
    return msgspec.json.encode(body)


class ReplyUsage(msgspec.Struct):
    """Usage of a whole reply."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class ReplyChoice(msgspec.Struct):
    """Fields needed of a whole reply's choice."""

    finish_reason: str | None = None


class WholeReply(msgspec.Struct):
    """A reply that is not streamed."""

    choices: list[ReplyChoice] = []
    usage: ReplyUsage | None = None


_whole = msgspec.json.Decoder(WholeReply).decode


class _RawReply(msgspec.Struct):
    choices: msgspec.Raw = ABSENT


def _check_choices(reply: bytes) -> None:
    """Raise `msgspec.DecodeError` for a long reply with too many choices."""
    choices = memoryview(msgspec.json.decode(reply, type=_RawReply).choices)
    if choices and measure(choices).items > _MAX_CHOICES:
        raise msgspec.DecodeError(f"a reply with over {_MAX_CHOICES} choices")


def whole(reply: bytes) -> WholeReply:
    """Parse a whole reply; raise `msgspec.DecodeError`, `UnicodeDecodeError`."""
    is_long = len(reply) > _MAX_REGULAR_BYTES
    if is_long:
        _check_choices(reply)
    try:
        return _whole(reply)
    except msgspec.ValidationError:
        if is_long or not isinstance(msgspec.json.decode(reply), dict):
            raise
        return msgspec.convert(normalized(reply), WholeReply)


def normalized(payload: bytes) -> dict[str, Any]:
    """Return JSON in the shape of a reply or chunk; raise as `chunk`, also for bad ids."""
    body = msgspec.json.decode(payload)
    if not isinstance(body, dict):
        return {}
    choices = body.get("choices")
    body["choices"] = [
        _choice(choice)
        for choice in (choices if isinstance(choices, list) else [])
        if isinstance(choice, dict)
    ]
    for name in ("id", "model"):
        if name in body and not isinstance(body[name], str):
            body[name] = "" if body[name] is None else str(body[name])
    if "created" in body:
        body["created"] = count(body["created"]) or 0
    if "usage" in body:
        body["usage"] = _usage(body["usage"])
    if not isinstance(body.get("error"), dict):
        error = body.pop("error", None)
        if error:
            body["error"] = {"message": str(error)}
    if not isinstance(body.get("nvext"), dict):
        body.pop("nvext", None)
    return body


def count(value: Any) -> int | None:
    """Return a number as an integer; None for other types."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, float):
        return int(value) if abs(value) <= _MAX_EXACT_FLOAT else None
    return value


def _choice(choice: dict[str, Any]) -> dict[str, Any]:
    choice = dict(choice)
    if "index" in choice:
        choice["index"] = count(choice["index"]) or 0
    for name in ("finish_reason", "text"):
        if not isinstance(choice.get(name, ""), str):
            choice[name] = None if name == "finish_reason" else ""
    if "delta" in choice:
        delta = choice["delta"] if isinstance(choice["delta"], dict) else {}
        choice["delta"] = delta
        for name in Delta.__struct_fields__:
            if not isinstance(delta.get(name), str | None):
                choice["delta"] = delta = delta | {name: _parts(delta[name])}
    for name in ("token_ids", "prompt_token_ids"):
        if name in choice:
            choice[name] = _ids(choice[name])
    return choice


def _parts(content: Any) -> str:
    parts = content if isinstance(content, list) else []
    texts = (part.get("text") if isinstance(part, dict) else part for part in parts)
    return "".join(text for text in texts if isinstance(text, str))


def _ids(value: Any) -> list[int] | None:
    if value is None:
        return None
    if not isinstance(value, list):
        raise msgspec.ValidationError("token ids that are no list")
    counts = [count(item) for item in value]
    ids = [item for item in counts if item is not None and item >= 0]
    if len(ids) < len(value):
        raise msgspec.ValidationError("token ids that are no numbers")
    return ids


def _usage(usage: Any) -> dict[str, Any] | None:
    if not isinstance(usage, dict):
        return None
    return {
        name: (count(value) or 0) if name in _COUNTS else value for name, value in usage.items()
    }


def cached_tokens(reply: bytes) -> int | None:
    """Return a reply's count of cached prompt tokens; None if absent."""
    try:
        usage = msgspec.json.decode(reply, type=dict[str, msgspec.Raw]).get("usage")
        body = None if usage is None else msgspec.json.decode(usage)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    details = body.get("prompt_tokens_details") if isinstance(body, dict) else None
    return count(details.get("cached_tokens")) if isinstance(details, dict) else None


def with_cached_tokens(payload: bytes, cached: int) -> bytes:
    """Return the JSON with another count of cached tokens, if it has one."""
    try:
        parts = msgspec.json.decode(payload, type=dict[str, msgspec.Raw])
        usage = msgspec.json.decode(parts.get("usage", msgspec.Raw(b"null")))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return payload
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    if not isinstance(details, dict) or "cached_tokens" not in details:
        return payload
    prompt_tokens = count(usage.get("prompt_tokens"))
    details["cached_tokens"] = cached if prompt_tokens is None else min(cached, prompt_tokens)
    return msgspec.json.encode({**parts, "usage": usage})
