"""Stream migration: what a client has been told so far, and what goes on elsewhere from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from pigou.wire.sse import DONE, frame

_ids = msgspec.json.Decoder(list[int]).decode


class ReplyHead(msgspec.Struct, frozen=True):
    """The fields that all chunks of a reply share."""

    id: str = ""
    created: int = 0
    model: str = ""


@dataclass(slots=True)
class StreamState:
    """State of a client's stream: all that another worker needs to go on with it."""

    # id, time of creation and model, as the first chunk had them; None before it.
    head: ReplyHead | None = None
    # token ids of the prompt, still as JSON; empty while no worker has said them.
    prompt: bytes = b""
    # generated token ids, as many as workers have reported.
    tokens: list[int] = field(default_factory=list)
    shown: int = 0  # tokens whose text was shown entirely; later ones may be half a character
    untold: bool = False  # text was shown whose token ids no worker has said
    finish: str | None = None  # why the sequence ended; None while it runs
    usage: bool = False  # whether the final usage was sent
    done: bool = False  # whether the stream is complete

    @property
    def begun(self) -> bool:
        """True if the client has been told anything."""
        return self.head is not None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt; 0 when no worker has said them."""
        return self.prompt.count(b",") + 1 if self.prompt else 0

    def prompt_ids(self) -> list[int]:
        """Return the prompt's token ids; empty when no worker has said them."""
        return _ids(self.prompt) if self.prompt else []

    def drop_unshown(self) -> int:
        """Forget tokens whose text was not shown entirely; return how many.

        A worker that is only told text generates them again, so that no character is cut in two.
        """
        dropped = len(self.tokens) - self.shown
        if dropped > 0:
            del self.tokens[self.shown :]
        return max(0, dropped)


def can_migrate(state: StreamState, *, single: bool, portable: bool, stock: bool) -> bool:
    """True if a broken stream can go on elsewhere without its client noticing.

    A stream of which the client has seen nothing always can. One that has begun needs the ids of
    its prompt and of all its tokens. On a stock worker nothing may depend on what came before but
    the tokens (stop strings, penalties, a grammar, a seed's generator), nor may the client count
    on exact ids.

    Args:
        state: of the client's stream.
        portable: the rest of the reply depends on nothing but the tokens so far.
        stock: the next worker knows nothing of `resume_tokens`.
    """
    if not state.begun:
        return True
    if not single or state.untold:
        return False
    if not state.tokens:
        return True
    if not state.prompt:
        return False
    return portable or not stock


class Continuation(NamedTuple):
    """The rest of a request once some output tokens have joined its prompt."""

    prompt_tokens: int  # tokens of the prompt, those so far included
    max_tokens: int  # most tokens that are still to come
    min_tokens: int = 0  # fewest tokens that are still to come

    @classmethod
    def after(
        cls, tokens: int, prompt_tokens: int, max_tokens: int, min_tokens: int = 0
    ) -> Continuation:
        """Return what is left after `tokens` output tokens."""
        return cls(prompt_tokens + tokens, max_tokens - tokens, max(0, min_tokens - tokens))


_CHUNK = "chat.completion.chunk"
_DETAILS, _CACHED = "prompt_tokens_details", "cached_tokens"


class MigratedChunks:
    """Makes the chunks of a later attempt fit what the client saw of the first.

    The reply keeps its id, time and model; the role is told once; token counts cover the whole
    reply; prompt ids are not told again.
    """

    def __init__(self, state: StreamState, *, chat: bool, wants_ids: bool, mapped: bool) -> None:
        self._state, self._is_chat, self._wants_ids = state, chat, wants_ids
        self._mapped = mapped  # completion chunks become chat chunks

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
            if self._is_chat and self._says_nothing_new(choice):
                return b""
            if not self._wants_ids:
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


def _reply_chunk(state: StreamState, chat: bool, choices: list[dict[str, Any]]) -> dict[str, Any]:
    head = state.head
    assert head is not None
    kind = _CHUNK if chat else "text_completion"
    head_fields = {"id": head.id, "object": kind, "created": head.created, "model": head.model}
    return head_fields | {"choices": choices}


def closing_frames(state: StreamState, *, chat: bool, wants_usage: bool) -> bytes:
    """Return the frames that end a stream whose last token came, but whose end did not."""
    if not wants_usage or state.usage:
        return DONE
    usage = usage_totals(state) | {_DETAILS: {_CACHED: 0}}
    return frame(msgspec.json.encode(_reply_chunk(state, chat, []) | {"usage": usage})) + DONE


def length_frame(state: StreamState, *, chat: bool) -> bytes:
    """Return the chunk that says a reply ended for its length, when its last token has come."""
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": "length"}
    choice |= {"delta": {"content": ""}} if chat else {"text": ""}
    choice |= {"stop_reason": None, "token_ids": None}
    return frame(msgspec.json.encode(_reply_chunk(state, chat, [choice])))
