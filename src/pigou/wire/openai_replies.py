"""Reply bodies, whole and in chunks, in the shapes of vLLM's OpenAI server."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from pigou.wire.sse import frame

Json: TypeAlias = dict[str, Any]
#: Sent in each reply as `system_fingerprint`.
FINGERPRINT = "pigou-0.1"

encode = msgspec.json.encode


class PromptTokensDetails(msgspec.Struct, omit_defaults=True):
    """Where the prompt's tokens came from."""

    cached_tokens: int | None = None


class UsageInfo(msgspec.Struct, omit_defaults=True):
    """Token counts of a reply: each prompt once, the outputs of all choices summed."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails | None
    completion_tokens_details: Json | None = None  # for models that reason


def usage(
    prompt: int, completion: int, cached: int | None = None, reasoning: int | None = None
) -> UsageInfo:
    """Return the usage; `cached` are the prompt tokens that were not computed, None hides them."""
    details = None if cached is None else PromptTokensDetails(cached)
    said = None if reasoning is None else {"reasoning_tokens": reasoning}
    return UsageInfo(prompt, prompt + completion, completion, details, said)


class Logprob(msgspec.Struct, frozen=True):
    """One token and its log-probability."""

    id: int
    token: str  # text added; "" while a character is incomplete
    logprob: float  # natural log-probability
    rank: int = 0  # 1 for the most probable
    bytes: list[int] = msgspec.field(default_factory=list)


class LogprobsEntry(msgspec.Struct, frozen=True):
    """A token that was sampled (or is in the prompt), and the most probable ones in its place."""

    chosen: Logprob | None  # None for a prompt's first token
    top: list[Logprob]  # most probable first
    text: str  # the chosen token's


def completion_logprobs(tokens: list[LogprobsEntry], offset: int) -> Json:
    """Return `logprobs` of a completion's choice; `offset` is where the first token's text is."""
    offsets, position = [], offset
    for token in tokens:
        offsets.append(position)
        position += len(token.text)
    return {
        "text_offset": offsets,
        "token_logprobs": [token.chosen and token.chosen.logprob for token in tokens],
        "tokens": [token.text for token in tokens],
        "top_logprobs": [_top(token) for token in tokens],
    }


def _top(token: LogprobsEntry) -> dict[str, float] | None:
    if token.chosen is None:
        return None
    top = {token.text: token.chosen.logprob}
    for other in token.top:
        top.setdefault(other.token, other.logprob)
    return top


def chat_logprobs(tokens: list[LogprobsEntry]) -> Json:
    """Return `logprobs` of a chat choice."""
    return {"content": [_chat_token(token) for token in tokens if token.chosen is not None]}


def _chat_token(token: LogprobsEntry) -> Json:
    chosen = token.chosen
    assert chosen is not None
    return {**_token(chosen), "top_logprobs": [_token(other) for other in token.top]}


def _token(one: Logprob) -> Json:
    return {"token": one.token, "logprob": one.logprob, "bytes": one.bytes}


def prompt_logprobs(tokens: list[LogprobsEntry]) -> list[Json | None]:
    """Return `prompt_logprobs`: per token of the prompt, a map from token id."""
    return [None if token.chosen is None else _by_id([token.chosen, *token.top])
            for token in tokens]  # fmt: skip


def _by_id(entries: list[Logprob]) -> Json:
    return {str(one.id): {"logprob": one.logprob, "rank": one.rank, "decoded_token": one.token}
            for one in entries}  # fmt: skip


def choice(
    index: int, content: Json, finish: str | None, stop: str | int | None, *,
    logprobs: Json | None = None, token_ids: list[int] | None = None, **rest: Any,
) -> Json:  # fmt: skip
    """Return one choice of a whole reply; `content` is its `text`, or its `message`."""
    return {
        "index": index, **content, "logprobs": logprobs, "finish_reason": finish,
        "stop_reason": stop, "token_ids": token_ids, **rest,
    }  # fmt: skip


def message(text: str, tool_calls: list[Json] | None, reasoning: str = "") -> Json:
    """Return the message of a chat choice; without text, calls and reasoning stand alone."""
    said: Json = {"role": "assistant", "content": text, "refusal": None}
    if reasoning:
        said |= {"content": text or None, **reasoning_fields(reasoning)}
    return said | {"content": text or None, "tool_calls": tool_calls} if tool_calls else said


def reasoning_fields(text: str) -> Json:
    """Return reasoning by both names that clients know."""
    return {"reasoning": text, "reasoning_content": text}


def whole(
    kind: Literal["text_completion", "chat.completion"], id: str, created: int, model: str,
    choices: list[Json], *, usage: UsageInfo | msgspec.Raw, ticket: Json | None = None, **rest: Any,
) -> bytes:  # fmt: skip
    """Encode a reply that is not streamed; `ticket` becomes `kv_transfer_params`."""
    head = {"id": id, "object": kind, "created": created, "model": model, "choices": choices}
    head |= {"service_tier": None, "system_fingerprint": FINGERPRINT, "usage": usage}
    return encode({**head, **rest, "kv_transfer_params": ticket})


class ReplyChunk(msgspec.Struct):
    """Variable part of a choice's chunks."""

    text: str  # new text, may be empty
    delta: Json | None = None  # delta of a chat's chunk, in place of text
    finish: str | None = None  # why the choice ended, on its last chunk
    stop: str | int | None = None  # the stop string or token id that ended it
    token_ids: list[int] | None = None  # new token ids, if requested
    logprobs: Json | None = None  # new tokens' logprobs, in the API's shape
    prompt_token_ids: list[int] | None = None  # on the first chunk, if requested
    usage: UsageInfo | None = None  # running usage, if requested


class StreamEncoder:
    """Encodes the chunks of one streamed reply (of one or more choices) as SSE frames."""

    __slots__ = ("_bare", "_chat", "_heads", "_open")

    def __init__(self, id: str, created: int, model: str, *, chat: bool) -> None:
        kind = "chat.completion.chunk" if chat else "text_completion"
        fixed = {"id": id, "object": kind, "created": created, "model": model}
        self._chat = chat
        self._open = encode(fixed)[:-1] + b',"choices":['
        self._bare = (
            b'},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
            if chat
            else b',"logprobs":null,"finish_reason":null,"stop_reason":null,'
            b'"prompt_token_ids":null,"token_ids":null}]}\n\n'
        )
        self._heads: dict[int, bytes] = {}

    def _head(self, index: int) -> bytes:
        head = self._heads.get(index)
        if head is None:
            text = b'"delta":{"content":' if self._chat else b'"text":'
            head = b"data: " + self._open + b'{"index":' + str(index).encode() + b"," + text
            self._heads[index] = head
        return head

    def text(self, index: int, text: str) -> bytes:
        """Return the frame of a text-only chunk, the common case."""
        return self._head(index) + encode(text) + self._bare

    def chunk(self, index: int, chunk: ReplyChunk) -> bytes:
        """Return the frame of a chunk."""
        if chunk.delta is not None:
            parts = [b"data: ", self._open, b'{"index":', str(index).encode(), b',"delta":']
            parts.append(encode(chunk.delta))
        else:
            parts = [self._head(index), encode(chunk.text)]
            if self._chat:
                parts.append(b"}")
        parts += [b',"logprobs":', encode(chunk.logprobs)]
        parts += [b',"finish_reason":', encode(chunk.finish)]
        if not self._chat or chunk.finish is not None:
            parts += [b',"stop_reason":', encode(chunk.stop)]
        if not self._chat:
            parts += [b',"prompt_token_ids":', encode(chunk.prompt_token_ids)]
        parts += [b',"token_ids":', encode(chunk.token_ids), b"}]"]
        if chunk.finish is not None:
            parts += [b',"system_fingerprint":', encode(FINGERPRINT)]
        if chunk.usage is not None:
            parts += [b',"usage":', encode(chunk.usage)]
        parts.append(b"}\n\n")
        return b"".join(parts)

    def role(
        self, index: int, prompt_token_ids: list[int] | None = None, usage: UsageInfo | None = None
    ) -> bytes:
        """Return the first frame of a chat choice, with its role."""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        rest = {"prompt_token_ids": prompt_token_ids} | ({} if usage is None else {"usage": usage})
        return frame(self._open + encode(choice) + b"]," + encode(rest)[1:])

    def usage(self, usage: UsageInfo | msgspec.Raw) -> bytes:
        """Return the frame that closes a stream with its usage."""
        rest = {"usage": usage, "system_fingerprint": FINGERPRINT}
        return frame(self._open + b"]," + encode(rest)[1:])


def models(name: str, root: str, created: int, max_model_len: int) -> bytes:
    """Encode the reply of `GET /v1/models`: one model, under the name that requests use."""
    return encode({"object": "list", "data": [model_card(name, root, created, max_model_len)]})


def model_card(name: str, root: str, created: int, max_model_len: int) -> Json:
    """Return the card of one model."""
    card = {"id": name, "object": "model", "created": created, "owned_by": "pigou", "root": root}
    return {**card, "parent": None, "max_model_len": max_model_len}
