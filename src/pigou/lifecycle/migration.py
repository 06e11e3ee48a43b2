"""Stream migration: the client's received state, and the request that continues it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from pigou.wire.sse import DONE, frame

_ids = msgspec.json.Decoder(list[int]).decode
_CHUNK = "chat.completion.chunk"
_DETAILS, _CACHED = "prompt_tokens_details", "cached_tokens"


class ReplyHead(msgspec.Struct, frozen=True):
    """Fields shared by all chunks of a reply."""

    id: str = ""
    created: int = 0
    model: str = ""


@dataclass(slots=True)
class StreamState:
    """State of a client's stream, as another worker needs it to continue."""

    head: ReplyHead | None = None  # head of the first chunk; None before it
    prompt: bytes = b""  # prompt token ids as JSON; empty until a worker reports them
    tokens: list[int] = field(default_factory=list)  # generated token ids reported by workers
    shown: int = 0  # tokens with their text fully shown; later ones may be half a character
    untold: bool = False  # text was shown without reported token ids
    reasoned: bool = False  # reasoning was shown, which a stock worker would resume as content
    finish: str | None = None  # finish reason; None while running
    usage: bool = False  # whether the final usage was sent
    done: bool = False

    @property
    def begun(self) -> bool:
        """True if the client has received anything."""
        return self.head is not None

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens; 0 if not reported."""
        return self.prompt.count(b",") + 1 if self.prompt else 0

    def prompt_ids(self) -> list[int]:
        """Return prompt token ids; empty if not reported."""
        return _ids(self.prompt) if self.prompt else []

    def drop_unshown(self) -> int:
        """Drop tokens not fully shown, so that no character is split; return how many."""
        dropped = len(self.tokens) - self.shown
        if dropped > 0:
            del self.tokens[self.shown :]
        return max(0, dropped)


def can_migrate(state: StreamState, *, single: bool, portable: bool, stock: bool) -> bool:
    """True if a broken stream can continue elsewhere unnoticed by its client.

    Once begun it needs the ids of prompt and tokens. On a `stock` worker, without `resume_tokens`,
    only tokens may matter (`portable`: no stop strings, penalties, grammar or seed), and no exact
    ids.
    """
    if not state.begun:
        return True
    if not single or state.untold:
        return False
    if not state.tokens:
        return True
    if not state.prompt:
        return False
    return (portable and not state.reasoned) or not stock


class Continuation(NamedTuple):
    """The rest of a request after output tokens joined its prompt."""

    prompt_tokens: int  # output so far included
    max_tokens: int  # still to generate at most
    min_tokens: int = 0  # still to generate at least

    @classmethod
    def after(
        cls, tokens: int, prompt_tokens: int, max_tokens: int, min_tokens: int = 0
    ) -> Continuation:
        """Return the rest after `tokens` output tokens."""
        return cls(prompt_tokens + tokens, max_tokens - tokens, max(0, min_tokens - tokens))


class MigratedChunks:
    """Rewrites later attempts' chunks to continue the first: same id, one role, whole usage."""

    def __init__(self, state: StreamState, *, chat: bool, wants_ids: bool, mapped: bool) -> None:
        self._state, self._is_chat, self._wants_ids = state, chat, wants_ids
        self._mapped = mapped  # completion chunks become chat chunks

    def fit(self, payload: bytes) -> bytes:
        """Return a chunk's JSON for the client; empty if it adds nothing."""
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
            if self._is_chat and self._says_nothing_new(choice):
                return b""
            if not self._wants_ids:
                choice["token_ids"] = None
            if "prompt_token_ids" in choice:
                choice["prompt_token_ids"] = None
        return msgspec.json.encode(body)

    def _says_nothing_new(self, choice: dict[str, Any]) -> bool:
        """Remove the role from a delta; return whether it is empty."""
        delta = choice.get("delta") or {}
        if delta.pop("role", None) is None:
            return False
        says = delta.get("content") or delta.get("tool_calls") or delta.get("reasoning")
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
    """Return the whole reply's usage by the gateway's count."""
    prompt, output = len(state.prompt_ids()), len(state.tokens)
    return {"prompt_tokens": prompt, "total_tokens": prompt + output, "completion_tokens": output}


def _whole(usage_body: dict[str, Any], state: StreamState) -> dict[str, Any]:
    usage = usage_totals(state)
    if (said := usage_body.get("completion_tokens_details")) is not None:
        usage["completion_tokens_details"] = said
    if _DETAILS not in usage_body:
        return usage
    details = usage_body[_DETAILS]
    if isinstance(details, dict) and isinstance(cached := details.get(_CACHED), int):
        details = details | {_CACHED: min(cached, usage["prompt_tokens"])}
    return usage | {_DETAILS: details}


def _reply_chunk(state: StreamState, chat: bool, choices: list[dict[str, Any]]) -> dict[str, Any]:
    head = state.head
    assert head is not None
    kind = _CHUNK if chat else "text_completion"
    head_fields = {"id": head.id, "object": kind, "created": head.created, "model": head.model}
    return head_fields | {"choices": choices}


def closing_frames(state: StreamState, *, chat: bool, wants_usage: bool) -> bytes:
    """Return the frames that end a stream after its last token."""
    if not wants_usage or state.usage:
        return DONE
    usage = usage_totals(state) | {_DETAILS: {_CACHED: 0}}
    return frame(msgspec.json.encode(_reply_chunk(state, chat, []) | {"usage": usage})) + DONE


def length_frame(state: StreamState, *, chat: bool) -> bytes:
    """Return the chunk that ends a reply for its length."""
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": "length"}
    choice |= {"delta": {"content": ""}} if chat else {"text": ""}
    choice |= {"stop_reason": None, "token_ids": None}
    return frame(msgspec.json.encode(_reply_chunk(state, chat, [choice])))
