"""Replies of servers that deviate from the API in harmless ways, brought into its shape.

Null or missing lists, counts as floats, and deltas or texts that are null are usual among
OpenAI-compatible servers. They must end no stream, and clients should not meet them.
"""

from __future__ import annotations

from typing import Any

import msgspec

#: The largest integer that a float holds exactly.
_MOST_EXACT = 2**53
_COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")


class Counted(msgspec.Struct):
    """Usage of a whole reply."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class WholeChoice(msgspec.Struct):
    """What is read of a choice."""

    finish_reason: str | None = None


class Whole(msgspec.Struct):
    """A reply that is not streamed."""

    choices: list[WholeChoice] = []
    usage: Counted | None = None


_whole = msgspec.json.Decoder(Whole).decode


def whole(reply: bytes) -> Whole:
    """Return what is read of a reply; counts and lists that it does not tell are 0 and empty.

    Raises:
        msgspec.DecodeError, UnicodeDecodeError: it is no JSON object.
    """
    try:
        return _whole(reply)
    except msgspec.ValidationError:
        if not isinstance(msgspec.json.decode(reply), dict):
            raise
        return msgspec.convert(regular(reply), Whole)


def regular(payload: bytes) -> dict[str, Any]:
    """Return a JSON value in the shape of a reply or chunk; empty where it is no object.

    Raises:
        msgspec.DecodeError, UnicodeDecodeError: it is not JSON, or has token ids that are none.
    """
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
    """Return a number as an integer; None for what is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, float):
        return int(value) if abs(value) <= _MOST_EXACT else None
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
        if not isinstance(delta.get("content"), str | None):
            choice["delta"] = delta | {"content": _parts(delta["content"])}
    for name in ("token_ids", "prompt_token_ids"):
        if name in choice:
            choice[name] = _ids(choice[name])
    return choice


def _parts(content: Any) -> str:
    """Return the text of content that comes in parts."""
    parts = content if isinstance(content, list) else []
    texts = (part.get("text") if isinstance(part, dict) else part for part in parts)
    return "".join(text for text in texts if isinstance(text, str))


def _ids(value: Any) -> list[int] | None:
    if value is None:
        return None
    if not isinstance(value, list):
        raise msgspec.ValidationError("token ids that are no list")
    found = [count(item) for item in value]
    ids = [item for item in found if item is not None and item >= 0]
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
    """Return what a reply says was cached of its prompt; None where it says nothing."""
    try:
        usage = msgspec.json.decode(reply, type=dict[str, msgspec.Raw]).get("usage")
        body = None if usage is None else msgspec.json.decode(usage)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    details = body.get("prompt_tokens_details") if isinstance(body, dict) else None
    return count(details.get("cached_tokens")) if isinstance(details, dict) else None


def with_cached_tokens(payload: bytes, cached: int) -> bytes:
    """Return a reply's or chunk's JSON with another count of cached tokens, where it has one."""
    try:
        parts = msgspec.json.decode(payload, type=dict[str, msgspec.Raw])
        usage = msgspec.json.decode(parts.get("usage", msgspec.Raw(b"null")))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return payload
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    if not isinstance(details, dict) or "cached_tokens" not in details:
        return payload
    most = count(usage.get("prompt_tokens"))
    details["cached_tokens"] = cached if most is None else min(cached, most)
    return msgspec.json.encode({**parts, "usage": usage})
