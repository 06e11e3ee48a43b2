"""The splice: a stream that goes on elsewhere looks as if it had never moved."""

from __future__ import annotations

from typing import Any

import msgspec

from pigou.gateway.call import Call
from pigou.gateway.transcript import Transcript
from pigou.wire.errors import error_body
from pigou.wire.sse import DONE, frame

_CHUNK = "chat.completion.chunk"
_DETAILS, _CACHED = "prompt_tokens_details", "cached_tokens"


class Splice:
    """Makes the chunks of a later attempt fit what the client saw of the first.

    The reply keeps its id, time and model; the role is told once; token counts cover the whole
    reply; prompt ids are not told again.
    """

    def __init__(self, call: Call, transcript: Transcript, mapped: bool) -> None:
        """Prepare for one attempt; `mapped` turns completion chunks into chat chunks."""
        self._call = call
        self._transcript = transcript
        self._mapped = mapped

    def fit(self, payload: bytes) -> bytes:
        """Return a chunk's JSON for the client, empty where the client knows it all."""
        body: dict[str, Any] = msgspec.json.decode(payload)
        head = self._transcript.head
        assert head is not None
        body |= {"id": head.id, "created": head.created, "model": head.model}
        if body.get("usage") is not None:
            body["usage"] = _whole(body["usage"], self._transcript)
        body.pop("prompt_token_ids", None)
        choices = body.get("choices") or []
        if self._mapped:
            body["object"] = _CHUNK
            body["choices"] = choices = [self._chat(choice) for choice in choices]
        for choice in choices:
            if self._call.chat and self._says_nothing_new(choice):
                return b""
            if not self._call.wants_ids:
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
        found = {
            "index": 0,
            "delta": {"content": choice.get("text", "")},
            "logprobs": None,
            "finish_reason": choice.get("finish_reason"),
            "token_ids": choice.get("token_ids"),
        }
        if found["finish_reason"] is not None:
            found["stop_reason"] = choice.get("stop_reason")
        return found


def totals(transcript: Transcript) -> dict[str, Any]:
    """Return the usage of the whole reply, by the gateway's own count."""
    prompt, output = len(transcript.prompt_ids()), len(transcript.tokens)
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + output,
        "completion_tokens": output,
    }


def _whole(told: dict[str, Any], transcript: Transcript) -> dict[str, Any]:
    """Return the usage of the whole reply, with the details that its last worker told.

    What that found in its cache may reach beyond the prompt, into tokens of the reply.
    """
    usage = totals(transcript)
    if _DETAILS not in told:
        return usage
    details = told[_DETAILS]
    if isinstance(details, dict) and isinstance(cached := details.get(_CACHED), int):
        details = details | {_CACHED: min(cached, usage["prompt_tokens"])}
    return usage | {_DETAILS: details}


def closing(call: Call, transcript: Transcript) -> bytes:
    """Return the frames that end a stream whose last token came, but whose end did not."""
    head = transcript.head
    assert head is not None
    frames = []
    if call.wants_usage and not transcript.usage:
        body = {
            "id": head.id,
            "object": _CHUNK if call.chat else "text_completion",
            "created": head.created,
            "model": head.model,
            "choices": [],
            "usage": totals(transcript) | {_DETAILS: {_CACHED: 0}},
        }
        frames.append(frame(msgspec.json.encode(body)))
    return b"".join([*frames, DONE])


def out_of_room(call: Call, transcript: Transcript) -> bytes:
    """Return the chunk that says a reply ended for its length, when its last token has come."""
    head = transcript.head
    assert head is not None
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": "length"}
    choice |= {"delta": {"content": ""}} if call.chat else {"text": ""}
    body = {
        "id": head.id,
        "object": _CHUNK if call.chat else "text_completion",
        "created": head.created,
        "model": head.model,
        "choices": [choice | {"stop_reason": None, "token_ids": None}],
    }
    return frame(msgspec.json.encode(body))


def error_frames(status: int, message: str, kind: str) -> bytes:
    """Return the frames that end a stream which cannot go on."""
    return frame(error_body(message, kind, None, status)) + DONE
