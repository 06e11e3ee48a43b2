"""Reads prompts: exact tokens of each request, and block keys for the router."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pigou.config import ConfigError
from pigou.control.lengths import lexical
from pigou.control.prefix_index.block_keys import chain, token_array
from pigou.gateway.failure import WorkerFailed
from pigou.gateway.proxy.upstream import Engine, Upstream
from pigou.gateway.request import Body, BodyFields, GatewayRun, TokenPrompt
from pigou.gateway.request_parsing import digest, first_prompt
from pigou.request import BlockKeys
from pigou.text.chat_template import ChatError, ChatTemplate, parse_call
from pigou.text.model_files import find_tokenizer
from pigou.text.tokenizer import Tokenizer, TokenizerError
from pigou.wire.bodies import MAX_PAGE_BYTES, REPLIES
from pigou.wire.errors import APIError
from pigou.wire.fair_turns import FairThreadPool
from pigou.wire.request_validation import check_messages

_messages = msgspec.json.Decoder(list[dict[str, Any]])
_log = logging.getLogger("pigou.gateway")
#: Characters of text (or ids) above which a prompt is worked on off the event loop: about half a
#: millisecond of work.
LONG = 2048
_ASK_S = 5.0
_TEXT = "Two roads, 4/3:\n\tnaïve — 日本語 {x} <s>[1]</s> and  so on."
_CHAT = [{"role": "user", "content": _TEXT}, {"role": "assistant", "content": "Yes: 1.5"},
         {"role": "user", "content": "And then?"}]  # fmt: skip
#: Fields that a worker's `/tokenize` reads as well, and those that only other makes' read.
_SHARED = ("add_special_tokens",)
_CHAT_SHARED = ("messages", "add_generation_prompt", "continue_final_message",
                "chat_template_kwargs", "tools", *_SHARED)  # fmt: skip
_CHAT_STOCK = ("chat_template",)
_T = TypeVar("_T")


class NotTokenizable(ValueError):
    """The prompt cannot be tokenized here; the worker tokenizes or rejects it."""


class PromptTokenizer:
    """A tokenizer and its chat template."""

    allow_special_tokens = False

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, version: str = ""
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template  # for chats; None where the model has none
        self.version = version  # digest of the template; empty where there is none

    @classmethod
    def load(cls, folder: Path) -> PromptTokenizer:
        """Load from a model folder; raise `ConfigError` if unusable."""
        try:
            tokenizer = Tokenizer.load(folder)
            template = ChatTemplate.choose(tokenizer.templates, tokenizer.names)
        except (TokenizerError, ValueError, OSError, KeyError, TypeError) as error:
            raise ConfigError(f"the tokenizer of {folder} cannot be used: {error}") from error
        return cls(tokenizer, template, digest(template.identity.encode()) if template else "")

    @classmethod
    def named(cls, name: str) -> PromptTokenizer:
        """Load by folder or hub id; raise `ConfigError` if unavailable."""
        folder = find_tokenizer(name, download=True)
        if folder is None:
            raise ConfigError(
                f"tokenizer is {name!r}; it must be a folder with a tokenizer.json, or a "
                "Hugging Face hub id that can be had"
            )
        return cls.load(folder)

    @property
    def max_token_bytes(self) -> int:
        """Maximum bytes per token."""
        return self.tokenizer.vocabulary.max_token_bytes

    def encode(
        self, text: str | list[int], fields: BodyFields, *, chat: bool, scope: str | None = None
    ) -> list[int]:
        """Return the token ids of a result of `prompt_of`; raise `NotTokenizable`."""
        if isinstance(text, list):
            return text
        special = fields.add_special_tokens
        try:
            special = bool(special) if chat else special is not False
            return self.tokenizer.encode(text, special, scope)
        except (ValueError, TypeError) as error:
            raise NotTokenizable(str(error)) from error

    def prompt_of(self, fields: BodyFields, *, chat: bool, stock: bool) -> str | list[int]:
        """Return the (first) prompt's text or ids; raises `NotTokenizable`."""
        if not chat:
            return text_or_ids(fields.prompt)
        if fields.prompt_token_ids and not stock:
            return fields.prompt_token_ids
        if self.template is None or fields.chat_template is not None:
            raise NotTokenizable("there is no template, or one of the request's own")
        variables = dict(fields.chat_template_kwargs or {})
        if {"messages", "add_generation_prompt"} & variables.keys():
            raise NotTokenizable("the template's variables are fields of their own")
        if fields.reasoning_effort is not None:
            variables["reasoning_effort"] = fields.reasoning_effort
        if fields.tools and (stock or fields.tool_choice != "none"):
            variables["tools"] = fields.tools
        try:
            messages = _messages.decode(fields.messages)
            check_messages(messages)
            if stock:  # it reads special tokens wherever they stand
                messages = [_parsed(message) for message in messages]
            elif not self.allow_special_tokens:
                messages = self.tokenizer.control.guard(messages)
                variables = self.tokenizer.control.guard(variables)
            return self.template.render(
                messages,
                add_generation_prompt=fields.add_generation_prompt is not False,
                continue_final_message=bool(fields.continue_final_message),
                variables=variables,
            )
        except (APIError, ChatError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise NotTokenizable(str(error)) from error
        except (KeyError, TypeError, AttributeError) as error:
            raise NotTokenizable(f"messages: {error!r}") from error


def text_or_ids(prompt: Any) -> str | list[int]:
    """Return the first prompt of a completion, text or ids; raise `NotTokenizable`."""
    prompt = first_prompt(prompt)
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and all(type(token) is int for token in prompt):
        return prompt
    raise NotTokenizable("prompt is neither text nor token ids")


def _parsed(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as vLLM passes it to templates: null content as "", arguments parsed."""
    if message.get("content") is None:
        message = {**message, "content": ""}
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    try:
        return {**message, "tool_calls": [parse_call(run) for run in calls]}
    except ValueError as error:
        raise NotTokenizable(f"tool_calls: {error}") from error


class TokenizationMode(IntEnum):
    """How prompts are tokenized: not at all, here, or by asking a worker each time."""

    NONE = 0
    GATEWAY = 1
    WORKER = 2


@dataclass(frozen=True, slots=True)
class _PromptTokens:
    """Tokens of a prompt: count, block keys by block size, and ids as JSON or None."""

    count: int
    keys: dict[int, BlockKeys]
    ids: msgspec.Raw | None = None
    token_prompt: TokenPrompt | None = None  # for workers that take token ids
    features: tuple[float, ...] = ()  # words and marks of its text


class _PlainMessage(msgspec.Struct, forbid_unknown_fields=True):
    """A message that every engine gives to the template as it is."""

    role: str
    content: str


class _TokenizeReply(msgspec.Struct):
    tokens: list[int]


_plain_messages = msgspec.json.Decoder(list[_PlainMessage])


class PromptReader:
    """Loads the tokenizer of the fleet's model, and reads prompts with it.

    It must agree with the worker's `/tokenize` on two samples. Otherwise a worker tokenizes each
    prompt, or requests are routed without block keys.
    """

    def __init__(
        self, tokenizer: PromptTokenizer | None = None, *, allow_special_tokens: bool = False,
        token_endpoint: bool = True,
    ) -> None:  # fmt: skip
        self.counts_words = False  # for predicted output lengths
        self._token_endpoint = token_endpoint  # send ids where a worker has vLLM's endpoint
        self._special = allow_special_tokens
        self._tokenizer = self._ready(tokenizer)
        self._modes: dict[str, tuple[TokenizationMode, TokenizationMode]] = {}
        self._warned: set[str] = set()
        self._finding = asyncio.Lock()
        self._pool = FairThreadPool()

    def _ready(self, tokenizer: PromptTokenizer | None) -> PromptTokenizer | None:
        if tokenizer is not None:
            tokenizer.allow_special_tokens = self._special
            if not self._special:
                tokenizer.tokenizer.control.warm_up()
        return tokenizer

    def close(self) -> None:
        """Shut down the threads."""
        self._pool.close()

    @property
    def template(self) -> str:
        """Digest of the model's chat template; empty if not available here."""
        return "" if self._tokenizer is None else self._tokenizer.version

    def mode(self, *, chat: bool) -> TokenizationMode:
        """Return how a route's prompts are tokenized."""
        return max((modes[chat] for modes in self._modes.values()), default=TokenizationMode.NONE)

    async def meet(self, upstream: Upstream) -> None:
        """Check the tokenizer against a worker that came up."""
        async with self._finding:
            if self._tokenizer is None:
                self._tokenizer = await self._off_loop(lambda: self._ready(_find(upstream.engine)))
        size = upstream.worker.block_size
        await self._off_loop(lambda: chain([0] * size, size))  # compiled code is loaded once
        text = await self._compare(upstream, chat=False)
        chat = await self._compare(upstream, chat=True)
        self._modes[upstream.worker.id] = (text, chat)

    async def read(self, run: GatewayRun, upstreams: Collection[Upstream]) -> None:
        """Add the prompt's tokens and block keys to a run, if known; errors are the worker's."""
        try:
            tokens_of_prompt = await self._prompt_tokens(run, upstreams)
        except NotTokenizable:
            return
        if run.trace is not None:
            run.trace.phase("hash")
        run.prompt_tokens = max(1, tokens_of_prompt.count)
        run.features = tokens_of_prompt.features
        if not run.parsed.fields.scores_prompt(run.parsed.chat):
            run.keys = tokens_of_prompt.keys
        run.token_prompt = tokens_of_prompt.token_prompt if self._token_endpoint else None
        if tokens_of_prompt.ids is not None:
            name = "prompt_token_ids" if run.parsed.chat else "prompt"
            run.body = {**run.body, name: tokens_of_prompt.ids}

    async def _prompt_tokens(
        self, run: GatewayRun, upstreams: Collection[Upstream]
    ) -> _PromptTokens:
        fields, chat = run.parsed.fields, run.parsed.chat
        sizes = {up.worker.block_size for up in upstreams}
        source = run.parsed.prompts[0]
        if not chat and not isinstance(source, str | list):
            raise NotTokenizable("prompt is neither text nor token ids")
        mode, tokenizer = self.mode(chat=chat), self._tokenizer
        if isinstance(source, list) or (mode is TokenizationMode.GATEWAY and tokenizer is not None):

            def work() -> _PromptTokens:
                own = tokenizer if mode is TokenizationMode.GATEWAY else None
                return _tokenize(own, run, upstreams, sizes, self.counts_words)

            size = len(memoryview(fields.messages)) if source is None else len(source)
            return work() if size <= LONG else await self._pool.run(run.parsed.tenant, work)
        if mode is not TokenizationMode.WORKER:
            raise NotTokenizable("there is no tokenizer")
        tokens = _cut(await self._ask_any(run, source, upstreams), fields)
        if run.trace is not None:
            run.trace.phase("tokenize", (("pigou.tokens",), (len(tokens),)))
        if len(tokens) <= LONG:
            return _keyed(tokens, run, sizes)
        return await self._pool.run(run.parsed.tenant, lambda: _keyed(tokens, run, sizes))

    async def _compare(self, upstream: Upstream, *, chat: bool) -> TokenizationMode:
        """Return how a route's prompts can be tokenized for this worker."""
        engine, tokenizer = upstream.engine, self._tokenizer
        fields = BodyFields(prompt=_TEXT, messages=msgspec.Raw(msgspec.json.encode(_CHAT)))
        body: Body = {"messages": _CHAT} if chat else {"prompt": _TEXT}
        worker_tokens = await _ask(upstream, body | {"model": engine.model})
        own_tokens = None
        if tokenizer is not None:
            try:
                text = tokenizer.prompt_of(fields, chat=chat, stock=engine.stock)
                own_tokens = tokenizer.encode(text, fields, chat=chat)
            except NotTokenizable:
                pass
        kind = "chats" if chat else "prompts"
        if own_tokens is not None and worker_tokens in (None, own_tokens):
            return TokenizationMode.GATEWAY
        if worker_tokens is None:
            if not chat:
                self._warn(
                    f"{upstream.worker.id}: no tokenizer for {engine.model!r}, and the worker "
                    f"has no /tokenize; text {kind} are routed without knowing what is cached. "
                    "Give --tokenizer"
                )
            return TokenizationMode.NONE
        why = "the tokenizer here disagrees with it" if own_tokens else "there is no tokenizer here"
        self._warn(
            f"{upstream.worker.id}: {why}, so the worker is asked to tokenize all {kind} of "
            f"{engine.model!r}, which is slow. Give --tokenizer"
        )
        return TokenizationMode.WORKER

    async def _ask_any(
        self, run: GatewayRun, source: str | None, upstreams: Collection[Upstream]
    ) -> list[int]:
        with suppress(TimeoutError):
            async with asyncio.timeout(_ASK_S):
                for upstream in sorted(upstreams, key=lambda up: up.inflight):
                    stock = upstream.engine.stock
                    names = _SHARED if source is not None else _CHAT_SHARED + _CHAT_STOCK * stock
                    body = {name: run.body[name] for name in names if name in run.body}
                    body |= {"model": upstream.engine.model}
                    body |= {} if source is None else {"prompt": source}
                    if (tokens := await _ask(upstream, body)) is not None:
                        return tokens
        raise NotTokenizable("no worker tokenizes it")

    def _warn(self, words: str) -> None:
        if words not in self._warned:
            self._warned.add(words)
            _log.warning(words)

    async def _off_loop(self, work: Callable[[], _T]) -> _T:
        return await self._pool.run("", work)


def _find(engine: Engine) -> PromptTokenizer | None:
    for name in (engine.root, engine.model):
        folder = find_tokenizer(name)
        if folder is not None:
            try:
                return PromptTokenizer.load(folder)
            except ConfigError as error:
                _log.warning("%s", error)
    return None


async def _ask(upstream: Upstream, body: Body) -> list[int] | None:
    """Return a worker's tokens of a prompt; None if it gives none."""
    try:
        async with asyncio.timeout(_ASK_S):
            with REPLIES.reserve() as held:
                answer = await upstream.whole(
                    "/tokenize", body, "tokenize", held=held, max_bytes=MAX_PAGE_BYTES
                )
        return msgspec.json.decode(answer, type=_TokenizeReply).tokens
    except (WorkerFailed, APIError, TimeoutError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _tokenize(
    tokenizer: PromptTokenizer | None,
    run: GatewayRun,
    upstreams: Collection[Upstream],
    sizes: Collection[int],
    counts_words: bool = False,
) -> _PromptTokens:
    """Tokenize a prompt, or pass on its ids."""
    fields, chat = run.parsed.fields, run.parsed.chat
    stock = any(up.engine.stock for up in upstreams)
    max_context = max((up.engine.max_model_len for up in upstreams), default=0)
    if tokenizer is None:
        ids = text_or_ids(fields.prompt)
        assert isinstance(ids, list)
        return _keyed(_cut(ids, fields), run, sizes)
    source = tokenizer.prompt_of(fields, chat=chat, stock=stock)
    if run.trace is not None:
        run.trace.phase("assemble")
    if (
        max_context
        and isinstance(source, str)
        and len(source) > max_context * tokenizer.max_token_bytes
    ):
        raise NotTokenizable("it is longer than the context")
    tokens = tokenizer.encode(source, fields, chat=chat, scope=run.parsed.salt)
    if run.trace is not None:
        run.trace.phase("tokenize", (("pigou.tokens",), (len(tokens),)))
    tokens_of_prompt = _keyed(_cut(tokens, fields), run, sizes)
    if counts_words and isinstance(source, str):
        tokens_of_prompt = replace(tokens_of_prompt, features=lexical(source))
    wanted = run.parsed.single and not fields.echo and fields.truncate_prompt_tokens is None
    if not (wanted and 0 < len(tokens) <= max_context):
        return tokens_of_prompt
    if stock:
        endpoint = any(chat in up.engine.generate_defaults for up in upstreams)
        if endpoint and (not chat or _is_plain(fields.messages)):
            prompt = TokenPrompt(tokens, tokenizer.tokenizer.backend)
            return replace(tokens_of_prompt, token_prompt=prompt)
        return tokens_of_prompt
    if not isinstance(source, str):
        return tokens_of_prompt
    return replace(tokens_of_prompt, ids=msgspec.Raw(msgspec.json.encode(tokens)))


def _is_plain(messages: msgspec.Raw) -> bool:
    with suppress(msgspec.DecodeError, UnicodeDecodeError):
        return bool(_plain_messages.decode(messages))
    return False


def _cut(tokens: list[int], fields: BodyFields) -> list[int]:
    keep = fields.truncate_prompt_tokens
    return tokens[-keep:] if keep is not None and keep > 0 else tokens


def _keyed(tokens: list[int], run: GatewayRun, sizes: Collection[int]) -> _PromptTokens:
    try:
        packed = token_array(tokens)
        keys = {
            size: chain(packed, size, run.parsed.salt, lora=run.parsed.adapter) for size in sizes
        }
    except (OverflowError, ValueError, TypeError) as error:
        raise NotTokenizable(f"ids are out of range: {error}") from error
    return _PromptTokens(len(tokens), keys)
