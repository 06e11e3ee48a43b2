"""From the text of a request to prompt tokens, and the hashes of their blocks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from pigou.kv.hashing import chain
from pigou.kv.tenure import salt_expiry
from pigou.request import BlockHashes, no_hashes
from pigou.text.chat_template import ChatError
from pigou.text.tool_calls import open_reasoning
from pigou.wire import request_validation
from pigou.wire.errors import bad_request
from pigou.wire.openai_requests import ChatRequest, CompletionRequest, GenerationRequest
from pigou.worker.config import WorkerConfig
from pigou.worker.served_model import ServedModel

#: Texts and prompts longer than this (characters, tokens) are processed off the event loop.
LONG = 4096
#: Tokens at the end of a prompt in which a template opens reasoning.
_PROMPT_END = 24
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """Tokens of one prompt; the last `resumed` of them were generated elsewhere."""

    tokens: list[int]  # token ids, resumed ones included
    resumed: int  # how many of the last tokens were generated elsewhere
    text: str | None  # what was tokenized; None for token ids and for a truncated prompt
    hashes: BlockHashes  # of its full blocks, shape (n, 2); empty where it must not hit the cache

    @property
    def original(self) -> list[int]:
        """Tokens without the resumed ones."""
        return self.tokens[: len(self.tokens) - self.resumed]

    @property
    def output(self) -> list[int]:
        """Tokens that were generated elsewhere."""
        return self.tokens[len(self.tokens) - self.resumed :]


class PromptProcessor:
    """Renders, tokenizes and hashes prompts; long ones on threads of its own."""

    def __init__(self, model: ServedModel, config: WorkerConfig) -> None:
        self._model = model
        self._config = config
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="tokenize")

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def off_loop(self, call: Callable[[], _T]) -> _T:
        """Return what `call` returns, called on a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)

    # --- text and tokens --------------------------------------------------------------------

    def source(self, request: CompletionRequest | ChatRequest) -> tuple[str | list[int], bool]:
        """Return the one prompt of a request, and whether special tokens are added to its text."""
        if isinstance(request, ChatRequest):
            source = request.prompt_token_ids or self.render(request)
            return source, bool(request.add_special_tokens)
        prompts = request_validation.prompts(request)
        if len(prompts) != 1:
            raise bad_request(f"prompt has {len(prompts)} prompts; ask for one.", "prompt")
        return prompts[0], request.add_special_tokens is not False

    def render(self, request: Any) -> str:
        """Return the text of a chat's prompt, by the model's template.

        Raises:
            APIError: 400, there is no template, or it refuses the messages.
        """
        template = self._model.template
        if template is None:
            raise bad_request(
                f"The model {self._model.name} has no chat template: use /v1/completions.",
                "messages",
            )
        messages, variables = request.messages, _template_variables(request)
        try:
            if not self._config.allow_special_tokens:
                guard = self._model.tokenizer.guard
                messages, variables = guard(messages), guard(variables)
            return template.render(
                messages,
                add_generation_prompt=request.add_generation_prompt is not False,
                continue_final_message=bool(request.continue_final_message),
                variables=variables,
            )
        except ChatError as error:
            raise bad_request(str(error), "messages") from None

    async def encode(self, text: str, special: bool) -> list[int]:
        """Return the tokens of a text; a long one is tokenized off the event loop.

        Raises:
            APIError: 400, the text is longer than the context could hold.
        """
        context = self._model.limits.max_model_len
        max_characters = context * self._model.tokenizer.vocabulary.max_token_bytes
        if len(text) > max_characters:
            raise bad_request(
                f"The prompt has {len(text)} characters, more than {max_characters}, which is "
                f"what the model's context of {context} tokens could hold at most.",
                "prompt",
            )
        if len(text) <= LONG:
            return self._model.tokenizer.encode(text, special)
        return await self.off_loop(lambda: self._model.tokenizer.encode(text, special))

    async def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens, control tokens included.

        Raises:
            APIError: 400, an id is not in the vocabulary.
        """
        self._check_vocabulary(tokens, "tokens")
        decode = self._model.tokenizer.decode
        if len(tokens) <= LONG:
            return decode(tokens, skip_special=False)
        return await self.off_loop(lambda: decode(tokens, skip_special=False))

    def echo(self, prompt: TokenizedPrompt) -> str:
        """Return the text of a prompt, without resumed tokens."""
        if prompt.text is not None:
            return prompt.text
        return self._model.tokenizer.decode(prompt.original)

    def open_reasoning(self, request: GenerationRequest, prompt: TokenizedPrompt) -> str:
        """Return what opened the reasoning that a chat's reply begins within; "" for none."""
        final = None
        if isinstance(request, ChatRequest) and request.continue_final_message:
            content = request.messages[-1].get("content")
            parts = content if isinstance(content, list) else [content]
            final = "".join(str(p.get("text", "") if isinstance(p, dict) else p) for p in parts)
        end = self._model.tokenizer.decode(prompt.original[-_PROMPT_END:], skip_special=False)
        return open_reasoning(end, final)

    # --- prompts ----------------------------------------------------------------------------

    async def prompt(
        self, request: GenerationRequest, source: str | list[int], special: bool
    ) -> TokenizedPrompt:
        """Return the prompt of `source`, text or token ids.

        Raises:
            APIError: 400, it has no tokens, unknown ones, or fewer than `resume_tokens` says.
        """
        text = source if isinstance(source, str) else None
        tokens = await self.encode(source, special) if isinstance(source, str) else source
        if not tokens:
            raise bad_request("The prompt has no tokens: send some text.", "prompt")
        resumed = request.resume_tokens or 0
        if resumed >= len(tokens):
            raise bad_request(
                f"resume_tokens is {resumed}; the prompt has {len(tokens)} tokens, and at least "
                "one of them must be the original prompt's.",
                "resume_tokens",
            )
        if request.truncate_prompt_tokens is not None:
            keep = request.truncate_prompt_tokens + resumed
            tokens, text = tokens[-keep:], None if len(tokens) > keep else text
        self._check_vocabulary(tokens, "prompt")
        limit = self._model.limits.max_model_len
        if len(tokens) > limit or request.prompt_logprobs is not None:
            return TokenizedPrompt(tokens, resumed, text, no_hashes())
        return TokenizedPrompt(tokens, resumed, text, await self._hashes(tokens, request))

    def cache_seed(self, request: GenerationRequest) -> bytes:
        """Return the seed of the request's block hashes; empty where nothing is to be cached.

        Nothing is cached under an expired tenure either: what was made under it is void.
        """
        salt = request.cache_salt or ""
        if not self._config.prefix_caching or salt_expiry(salt) <= time.time_ns():
            return b""
        return self._model.seed(salt)

    async def _hashes(self, tokens: list[int], request: GenerationRequest) -> BlockHashes:
        echoed = isinstance(request, CompletionRequest) and bool(request.echo)
        seed, size = self.cache_seed(request), self._config.block_size
        if not seed or (echoed and wants_logprobs(request)):
            return no_hashes()
        if len(tokens) <= LONG:
            return chain(tokens, size, seed)
        return await self.off_loop(lambda: chain(tokens, size, seed))

    def _check_vocabulary(self, tokens: list[int], field: str) -> None:
        size, largest = self._model.limits.vocab_size, max(tokens, default=0)
        if largest >= size:
            raise bad_request(
                f"{field} has the token id {largest}; the vocabulary has {size} tokens.", field
            )


def wants_logprobs(request: GenerationRequest) -> bool:
    """Return whether a request asks for log-probabilities of its output."""
    if isinstance(request, ChatRequest):
        return bool(request.logprobs)
    return isinstance(request, CompletionRequest) and request.logprobs not in (None, False)


def _template_variables(request: Any) -> dict[str, Any]:
    """Return what a chat template is given besides the messages."""
    variables = dict(request.chat_template_kwargs or {})
    if getattr(request, "reasoning_effort", None) is not None:
        variables["reasoning_effort"] = request.reasoning_effort
    if request.tools and getattr(request, "tool_choice", None) != "none":
        variables["tools"] = request.tools
    if reserved := {"messages", "add_generation_prompt"} & variables.keys():
        raise bad_request(
            f"chat_template_kwargs has {', '.join(sorted(reserved))}; that is a field of its own.",
            "chat_template_kwargs",
        )
    return variables
