"""Chunks of a worker's stream: the few fields that are read, and the ids that are cut out."""

from __future__ import annotations

from typing import Any

import msgspec

from pigou.gateway.regular import regular
from pigou.lifecycle.migration import ReplyHead

#: What opens a choice's token ids, as compact encoders write it.
IDS = b'"token_ids":['
PROMPT_IDS = b'"prompt_token_ids":['
_EXTENSION = b',"nvext":{"completion_token_ids":['
#: A field that is not there (`msgspec.Raw` cannot be optional).
ABSENT = msgspec.Raw(b"")


def given(raw: msgspec.Raw) -> bool:
    """Whether a field is there and not null."""
    return len(memoryview(raw)) > 4 or bytes(raw) not in (b"", b"null")


class Delta(msgspec.Struct):
    """What a chat chunk adds."""

    content: str | None = None


class Choice(msgspec.Struct):
    """What is read of each choice."""

    index: int = 0
    text: str = ""
    delta: Delta = msgspec.field(default_factory=Delta)
    token_ids: list[int] | None = None
    finish_reason: str | None = None

    @property
    def shown(self) -> str:
        """The text that the client sees of it."""
        return self.text or self.delta.content or ""


class Extension(msgspec.Struct):
    """What a frontend of Dynamo adds to a chunk."""

    completion_token_ids: list[int] | None = None


class Chunk(msgspec.Struct):
    """A chunk, or an error in its place."""

    choices: list[Choice] = []
    usage: msgspec.Raw = ABSENT
    nvext: Extension | None = None
    error: dict[str, Any] | None = None


class FullChoice(Choice):
    """A choice with what matters only at a stream's beginning."""

    prompt_token_ids: msgspec.Raw = ABSENT


class FullChunk(msgspec.Struct):
    """A chunk with the prompt's ids and its text."""

    id: str = ""
    created: int = 0
    model: str = ""
    choices: list[FullChoice] = []
    usage: msgspec.Raw = ABSENT
    nvext: Extension | None = None
    prompt_token_ids: msgspec.Raw = ABSENT
    error: dict[str, Any] | None = None

    def head(self) -> ReplyHead:
        """Return what the stream's other chunks have as well."""
        return ReplyHead(self.id, self.created, self.model)

    def prompt(self) -> bytes:
        """Return the prompt's ids, wherever they are; empty when they are not here."""
        places = [self.prompt_token_ids, *(choice.prompt_token_ids for choice in self.choices)]
        return next((bytes(raw) for raw in places if given(raw)), b"")


_chunk = msgspec.json.Decoder(Chunk).decode
_full_chunk = msgspec.json.Decoder(FullChunk).decode


def chunk(payload: bytes) -> tuple[Chunk, bytes]:
    """Return a chunk and its JSON, made regular where it was not.

    Raises:
        msgspec.DecodeError, UnicodeDecodeError: it is not JSON.
    """
    try:
        return _chunk(payload), payload
    except msgspec.ValidationError:
        value = regular(payload)
        return msgspec.convert(value, Chunk), msgspec.json.encode(value)


def full_chunk(payload: bytes) -> tuple[FullChunk, bytes]:
    """Return the same with the prompt's ids and the text; raise as `chunk`."""
    try:
        return _full_chunk(payload), payload
    except msgspec.ValidationError:
        payload = msgspec.json.encode(regular(payload))
        return _full_chunk(payload), payload


def without_ids(payload: bytes, prompt: bool) -> bytes:
    """Return a chunk's JSON with null in place of its token ids.

    Cuts bytes: within a JSON string a quote is escaped, so that what is looked for is a key.
    What another encoder has spaced out is decoded and encoded again.

    Args:
        payload: JSON of a chunk that has token ids.
        prompt: whether it has the prompt's ids as well.
    """
    at = payload.find(IDS)
    if at < 0 and not prompt:
        return _recoded(payload)
    while at >= 0:
        payload = payload[: at + 12] + b"null" + payload[payload.index(b"]", at) + 1 :]
        at = payload.find(IDS, at)
    if prompt:
        at = payload.find(PROMPT_IDS)
        if at < 0:
            return _recoded(payload)
        while at >= 0:
            payload = payload[: at + 19] + b"null" + payload[payload.index(b"]", at) + 1 :]
            at = payload.find(PROMPT_IDS, at)
    return payload


def without_extension(payload: bytes) -> bytes:
    """Return a chunk's JSON without Dynamo's extension, if it has nothing but token ids."""
    at = payload.rfind(_EXTENSION)
    if at < 0 or payload.find(b"]", at) != len(payload) - 3 or not payload.endswith(b"]}}"):
        return payload
    return payload[:at] + b"}"


def _recoded(payload: bytes) -> bytes:
    body: dict[str, Any] = msgspec.json.decode(payload)
    for each in [body, *(body.get("choices") or [])]:
        for name in ("token_ids", "prompt_token_ids"):
            if each.get(name) is not None:
                each[name] = None
    return msgspec.json.encode(body)
