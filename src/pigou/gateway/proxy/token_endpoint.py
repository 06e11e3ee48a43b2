"""Tokens in, tokens out: requests to vLLM's generate endpoint, and its replies as the API's.

The prompt's ids go to the worker, which tokenizes nothing, and detokenizes nothing unless there are
stop strings. Requests with other fields than `Carried` are sent as text.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Annotated, Any, Literal

import msgspec

from pigou.gateway.proxy.reply_parsing import ABSENT, given
from pigou.gateway.proxy.upstream import Engine
from pigou.gateway.request import Body, GatewayRun, RequestedStreamOptions
from pigou.text.detokenizer import EngineDetokenizer
from pigou.wire import openai_replies
from pigou.wire.errors import DECODING_ERRORS
from pigou.wire.openai_replies import ReplyChunk, StreamEncoder

#: Route of vLLM 0.32 with `--enable-scale-out`.
GENERATE = "/inference/v1/generate"
#: Fields that make the prompt, used where it is tokenized.
_PROMPT = frozenset((
    "prompt", "messages", "add_special_tokens", "add_generation_prompt", "continue_final_message",
    "chat_template_kwargs",
))  # fmt: skip
#: Tokens that a completion has if nobody says.
_DEFAULT_TOKENS = 16


#: Fields of `sampling_params`, under the same names; other fields of one, and those that are read.
_SAMPLING: dict[str, Any] = {
    **dict.fromkeys(("temperature", "top_p", "min_p"), float), "top_k": int, "seed": int,
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "repetition_penalty"), float),
    **dict.fromkeys(("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"), bool),
    "stop": str | list[str], "stop_token_ids": list[int],
}  # fmt: skip
_TOP: dict[str, Any] = {"model": str, "cache_salt": str, "priority": int, "stream": bool,
                        "stream_options": RequestedStreamOptions}  # fmt: skip
_READ: dict[str, Any] = {
    "max_tokens": int, "max_completion_tokens": int, "return_token_ids": bool, "user": str,
    # Those that are carried only if they ask for nothing.
    "n": Literal[1], "echo": bool, "logprobs": bool, "top_logprobs": Literal[0],
    "min_tokens": Literal[0], "response_format": dict[Literal["type"], Literal["text"]],
}  # fmt: skip
#: A body without its prompt; one with any other field goes as text.
Carried: Any = msgspec.defstruct(
    "Carried", [(name, kind | None, None) for name, kind in (_SAMPLING | _TOP | _READ).items()],
    forbid_unknown_fields=True, omit_defaults=True,
)  # fmt: skip


class _GenerateChoice(msgspec.Struct):
    token_ids: list[Annotated[int, msgspec.Meta(ge=0, lt=2**32)]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class _GenerateReply(msgspec.Struct):
    """A chunk, or a whole reply."""

    choices: list[_GenerateChoice] = []
    usage: msgspec.Raw = ABSENT
    error: msgspec.Raw = ABSENT
    kv_transfer_params: dict[str, Any] | None = None


_carried = msgspec.json.Decoder(Carried).decode
_reply = msgspec.json.Decoder(_GenerateReply).decode


class TokenRequest:
    """One attempt of a request at the endpoint: the body to send, and its reply's translation."""

    def __init__(self, run: GatewayRun, engine: Engine, body: Body, carried: Any) -> None:
        parsed, prompt, ids = run.parsed, run.token_prompt, body["token_ids"]
        assert prompt is not None
        self.body, self._prompt = body, prompt.ids
        self._chat = parsed.chat
        self._include = bool(carried.include_stop_str_in_output)
        self._text = EngineDetokenizer(
            prompt.backend, ids, skip_special=carried.skip_special_tokens is not False
        )
        self._head = ("chatcmpl-" if parsed.chat else "cmpl-") + parsed.wire_id, int(time.time())
        self._model = engine.model
        self._encoder = StreamEncoder(*self._head, self._model, chat=parsed.chat)
        self._begun = False
        self._max_tokens = body["sampling_params"].get("max_tokens", engine.max_model_len)
        stops = [carried.stop] if isinstance(carried.stop, str) else carried.stop or []
        self._stops = bool(stops)
        # characters that may begin a stop string.
        self._held = 0 if self._include else max(map(len, stops), default=1) - 1
        self._seen, self._shown = "", 0

    @classmethod
    def of(cls, run: GatewayRun, engine: Engine, generated: list[int]) -> TokenRequest | None:
        """Return the attempt that continues after `generated` tokens; None to send text."""
        parsed, prompt = run.parsed, run.token_prompt
        defaults = engine.generate_defaults.get(parsed.chat)
        if prompt is None or defaults is None or parsed.adapter:
            return None
        fields = {name: run.body[name] for name in run.body.keys() - _PROMPT}
        try:
            carried = _carried(msgspec.json.encode(fields))
        except DECODING_ERRORS:
            return None
        options, whole_with_ids = carried.stream_options, parsed.wants_ids and not parsed.stream
        in_each = options is not None and options.continuous_usage_stats
        # To vLLM `false` is 0 in a completion, and asks for the chosen tokens' own.
        scored = carried.logprobs or (carried.logprobs is False and not parsed.chat)
        if carried.echo or scored or whole_with_ids or in_each:
            return None
        values = msgspec.to_builtins(carried)
        sampling = {**defaults, **{name: values[name] for name in _SAMPLING.keys() & values.keys()}}
        limit = carried.max_completion_tokens if parsed.chat else None
        limit = carried.max_tokens if limit is None else limit
        if limit is None and not parsed.chat:
            limit = defaults.get("max_tokens", _DEFAULT_TOKENS)
        if not 1 <= (1 if limit is None else limit) <= engine.max_model_len - len(prompt.ids):
            return None  # the worker words the error
        if limit is not None:
            sampling["max_tokens"] = limit - len(generated)
        if not carried.stop:
            sampling["detokenize"] = False
        body: Body = {name: fields[name] for name in _TOP.keys() & values.keys()}
        body |= {"token_ids": prompt.ids + generated, "sampling_params": sampling}
        with suppress(OverflowError):  # a worker told ids that no tokenizer has
            request = cls(run, engine, body, carried)
            return request if request._text.exact else None
        return None

    def payloads(self, payload: bytes) -> list[bytes]:
        """Return the API's chunks for one of the endpoint's; raises as `msgspec.json.decode`."""
        chunk = _reply(payload)
        if given(chunk.error):
            return [payload]
        if len(chunk.choices) > 1:
            raise msgspec.ValidationError(f"a chunk of {len(chunk.choices)} choices")
        frames = []
        for choice in chunk.choices:
            prompt = None if self._begun else self._prompt
            if prompt is not None and self._chat:
                frames.append(self._encoder.role(0, prompt))
            self._begun = True
            sent = ReplyChunk(
                self._add(choice), finish=choice.finish_reason, stop=choice.stop_reason,
                token_ids=choice.token_ids, prompt_token_ids=prompt,
            )  # fmt: skip
            frames.append(self._encoder.chunk(0, sent))
        if not chunk.choices and given(chunk.usage):
            frames.append(self._encoder.usage(chunk.usage))
        return [frame[len(b"data: ") : -len(b"\n\n")] for frame in frames]

    def whole(self, payload: bytes) -> bytes:
        """Return the API's whole reply for the endpoint's; raises as `msgspec.json.decode`."""
        reply = _reply(payload)
        if len(reply.choices) != 1:
            raise msgspec.ValidationError(f"a reply of {len(reply.choices)} choices")
        [choice], text = reply.choices, self._add(reply.choices[0])
        content = {"message": openai_replies.message(text, None)} if self._chat else {"text": text}
        one = openai_replies.choice(0, content, choice.finish_reason, choice.stop_reason)
        kind: Literal["chat.completion", "text_completion"]
        kind = "chat.completion" if self._chat else "text_completion"
        usage, ticket = reply.usage, reply.kv_transfer_params
        return openai_replies.whole(
            kind, *self._head, self._model, [one], usage=usage, ticket=ticket
        )

    def _add(self, choice: _GenerateChoice) -> str:
        """Take tokens and return the text to show, cut and held back as by vLLM's engine."""
        ids, stop = choice.token_ids or [], choice.stop_reason
        if len(ids) > self._max_tokens:
            raise msgspec.ValidationError(
                f"{len(ids)} tokens where {self._max_tokens} were asked for"
            )
        if choice.finish_reason == "stop" and not (isinstance(stop, str) or self._include):
            ids = ids[:-1]  # the token that ended it is not shown
        new = "".join([self._text.next(token) for token in ids])
        if not self._stops:
            return new
        before, self._seen = len(self._seen), self._seen + new
        if isinstance(stop, str):
            at = self._seen.find(stop, max(0, before + 1 - len(stop)))
            self._seen = self._seen[: at + len(stop) * self._include] if at >= 0 else self._seen
        end = max(self._shown, len(self._seen) - (0 if choice.finish_reason else self._held))
        text, self._shown = self._seen[self._shown : end], end
        return text
