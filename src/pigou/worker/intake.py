"""From request bodies to sequences in the engine: names, limits, prompts, sampling."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from pigou.kv.hashing import chain
from pigou.kv.tenure import salt_expiry
from pigou.request import NEVER, BlockHashes, Request, no_hashes
from pigou.text.template import ChatError
from pigou.wire import checks
from pigou.wire.errors import APIError, bad_request
from pigou.wire.openai import ChatRequest, CompletionRequest, GenerationRequest
from pigou.wire.sampling import sampling_params
from pigou.wire.transfer import asks_to_hold, offers_blocks
from pigou.worker.choice import Choice, Explainer, TextOptions
from pigou.worker.commands import Add
from pigou.worker.config import WorkerConfig
from pigou.worker.grammar_pool import GrammarSource
from pigou.worker.model import ServedModel
from pigou.worker.reply import Reply, ReplyOptions, Sequence
from pigou.worker.service import Service
from pigou.worker.shapes import Shape, Shapes
from pigou.worker.tickets import checked_ticket
from pigou.worker.tools import ToolStream
from pigou.worker.transfer.ticket import Ticket

#: Most sequences that one request may ask for.
MAX_SEQUENCES = 1024
#: Text and prompts longer than this (characters, tokens) are worked on off the event loop.
LONG = 4096
_MILLISECOND = 1_000_000
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Prompt:
    """Tokens of one prompt; the last `resumed` of them were generated elsewhere."""

    tokens: list[int]
    resumed: int
    text: str | None
    hashes: BlockHashes

    @property
    def output(self) -> list[int]:
        """Tokens that were generated elsewhere."""
        return self.tokens[len(self.tokens) - self.resumed :]


class Intake:
    """Takes requests in. Raises `APIError` for what cannot be honoured."""

    def __init__(
        self,
        model: ServedModel,
        config: WorkerConfig,
        service: Service,
        grammars: GrammarSource,
        key: bytes = b"",
    ) -> None:
        """Take requests in for these.

        Args:
            model: that is served.
            config: of the worker.
            service: that computes.
            grammars: of requests.
            key: of the fleet, by which tickets of other workers are signed; empty takes any.
        """
        self._key = key
        self._model = model
        self._config = config
        self._shapes = Shapes(grammars, model, flexible=config.json_whitespace == "flexible")
        self._service = service
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="tokenize")
        self._numbers = itertools.count()

    async def completion(
        self, request: CompletionRequest, request_id: str, tenant: str = ""
    ) -> Reply:
        """Begin a completion; `request_id` becomes part of its id.

        Grammars are compiled in turn by `tenant`, or by `cache_salt` where that is empty.
        """
        await self._check(request)
        found = checks.prompts(request)
        if len(found) * (request.n or 1) > MAX_SEQUENCES:
            raise bad_request(
                f"prompt and n ask for {len(found) * (request.n or 1)} sequences; at most "
                f"{MAX_SEQUENCES} work in one request.",
                "prompt",
            )
        special = request.add_special_tokens is not False
        prompts = [await self._prompt(request, prompt, special) for prompt in found]
        echo = [self._text(prompt) for prompt in prompts] if request.echo else None
        shape = await self._shapes.shape(
            request, len(prompts) * (request.n or 1), prompts[0].output, tenant
        )
        ticket = await self._ticket(request, prompts[0])
        return self._begin(request, f"cmpl-{request_id}", prompts, echo, shape, ticket)

    async def chat(self, request: ChatRequest, request_id: str, tenant: str = "") -> Reply:
        """Begin a chat completion; see `completion`."""
        await self._check(request)
        tools = self._shapes.tools(request)
        prompt = await self._prompt(request, *self._source(request))
        shape = await self._shapes.shape(request, request.n or 1, prompt.output, tenant, tools)
        ticket = await self._ticket(request, prompt)
        return self._begin(request, f"chatcmpl-{request_id}", [prompt], None, shape, ticket)

    async def cached(self, request: CompletionRequest | ChatRequest) -> Request:
        """Return what identifies a prompt's blocks in the cache; nothing of it is computed."""
        self._service.check_open()
        self.check_model(request.model)
        prompt = await self._prompt(request, *self._source(request))
        return Request(
            id=f"lend-{next(self._numbers):x}",
            prompt=len(prompt.tokens),
            max_tokens=1,
            hashes=prompt.hashes,
            expiry=salt_expiry(request.cache_salt or ""),
        )

    def _source(self, request: CompletionRequest | ChatRequest) -> tuple[str | list[int], bool]:
        """Return the one prompt of a request, and whether special tokens are added to its text."""
        if isinstance(request, ChatRequest):
            source = request.prompt_token_ids or self.render(request)
            return source, bool(request.add_special_tokens)
        prompts = checks.prompts(request)
        if len(prompts) != 1:
            raise bad_request(f"prompt has {len(prompts)} prompts; ask for one.", "prompt")
        return prompts[0], request.add_special_tokens is not False

    def render(self, request: Any) -> str:
        """Return the text of a chat's prompt, by the model's template."""
        template = self._model.template
        if template is None:
            raise bad_request(
                f"The model {self._model.name} has no chat template: use /v1/completions.",
                "messages",
            )
        variables = dict(request.chat_template_kwargs or {})
        if getattr(request, "reasoning_effort", None) is not None:
            variables["reasoning_effort"] = request.reasoning_effort
        if request.tools and getattr(request, "tool_choice", None) != "none":
            variables["tools"] = request.tools
        if reserved := {"messages", "add_generation_prompt"} & variables.keys():
            raise bad_request(
                f"chat_template_kwargs has {', '.join(sorted(reserved))}; that is a field of its "
                "own.",
                "chat_template_kwargs",
            )
        messages = request.messages
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
        """Return the tokens of a text; a long one is tokenized off the event loop."""
        most = self._model.limits.max_model_len * self._model.tokenizer.vocabulary.longest
        if len(text) > most:
            raise bad_request(
                f"The prompt has {len(text)} characters, more than {most}, which is what the "
                f"model's context of {self._model.limits.max_model_len} tokens could hold at most.",
                "prompt",
            )
        if len(text) <= LONG:
            return self._model.tokenizer.encode(text, special)
        return await self._off_loop(lambda: self._model.tokenizer.encode(text, special))

    async def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens, control tokens included.

        Raises:
            APIError: 400, an id is not in the vocabulary.
        """
        self._check_vocabulary(tokens, "tokens")
        decode = self._model.tokenizer.decode
        if len(tokens) <= LONG:
            return decode(tokens, skip_special=False)
        return await self._off_loop(lambda: decode(tokens, skip_special=False))

    def check_model(self, name: str | None) -> None:
        """Raise `APIError` 404 unless the name is this worker's model."""
        if name is not None and name != self._model.name:
            raise APIError(
                404,
                f"The model {name!r} does not exist; this worker serves {self._model.name!r}.",
                "model",
            )

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    # --- checks -----------------------------------------------------------------------------

    async def _check(self, request: GenerationRequest) -> None:
        self._service.check_open()
        self.check_model(request.model)
        checks.check(request)
        waiting = self._service.gauges.waiting + self._service.held
        limit, asks = self._config.max_waiting, _sequences(request)
        if limit and asks > max(limit, self._config.max_seqs):
            raise bad_request(
                f"prompt and n ask for {asks} sequences; {limit} may wait at this worker: send "
                "fewer at once, or start it with a larger --max-waiting.",
                "n" if (request.n or 1) > 1 else "prompt",
            )
        if limit and waiting and waiting + asks > limit:
            raise APIError(503, f"The queue is full: {waiting} requests wait.", retry_after=1)
        order = self._config.order
        if request.priority and order != "priority":
            raise bad_request(
                f"priority is {request.priority}; this worker's order is {order}: start it with "
                "--order priority, or remove the field.",
                "priority",
            )
        if request.deadline_ms is not None and order != "edf":
            raise bad_request(
                f"deadline_ms is {request.deadline_ms}; this worker's order is {order}: start it "
                "with --order edf, or remove the field.",
                "deadline_ms",
            )
        if asks_to_hold(request.kv_transfer_params) and (
            request.stream
            or (request.n or 1) > 1
            or (isinstance(request, CompletionRequest) and len(checks.prompts(request)) > 1)
        ):
            raise bad_request(
                "kv_transfer_params.do_remote_decode needs one prompt, n of 1, and no stream.",
                "kv_transfer_params",
            )

    # --- prompts ----------------------------------------------------------------------------

    async def _prompt(
        self, request: GenerationRequest, source: str | list[int], special: bool
    ) -> _Prompt:
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
            return _Prompt(tokens, resumed, text, no_hashes())
        hashes = await self._hashes(tokens, request)
        return _Prompt(tokens, resumed, text, hashes)

    def _check_vocabulary(self, tokens: list[int], field: str) -> None:
        size, largest = self._model.limits.vocab_size, max(tokens, default=0)
        if largest >= size:
            raise bad_request(
                f"{field} has the token id {largest}; the vocabulary has {size} tokens.", field
            )

    async def _hashes(self, tokens: list[int], request: GenerationRequest) -> BlockHashes:
        """Return the hashes of the prompt's blocks.

        A request for the prompt's log-probabilities has none: what is cached is not computed,
        and what is not computed cannot be reported.
        """
        echoed = isinstance(request, CompletionRequest) and bool(request.echo)
        seed, size = self._seed(request), self._config.block_size
        if not seed or (echoed and _wants_logprobs(request)):
            return no_hashes()
        if len(tokens) <= LONG:
            return chain(tokens, size, seed)
        return await self._off_loop(lambda: chain(tokens, size, seed))

    def _seed(self, request: GenerationRequest) -> bytes:
        """Return the seed of the request's block hashes; empty where nothing is to be cached.

        That is also so under a tenure that has expired: what was made under it is void.
        """
        salt = request.cache_salt or ""
        if not self._config.prefix_caching or salt_expiry(salt) <= time.time_ns():
            return b""
        return self._model.seed(salt)

    def _text(self, prompt: _Prompt) -> str:
        if prompt.text is not None:
            return prompt.text
        original = prompt.tokens[: len(prompt.tokens) - prompt.resumed]
        return self._model.tokenizer.decode(original)

    async def _off_loop(self, call: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)

    # --- sequences --------------------------------------------------------------------------

    def _begin(
        self,
        request: GenerationRequest,
        id: str,
        prompts: list[_Prompt],
        echo: list[str] | None,
        shape: Shape,
        ticket: Ticket | None,
    ) -> Reply:
        options = self._options(request, echo)
        reply = Reply(id, int(time.time()), self._model.name, options)
        # Choice j of a seeded request is what the same request with seed + j yields.
        base = request.seed if request.seed is not None else secrets.randbits(62)
        pairs: list[tuple[Sequence, Add]] = []
        for prompt in prompts:
            for sample in range(options.per_prompt):
                seed, shown = base + sample, None if pairs else ticket
                pairs.append(self._sequence(request, reply, prompt, len(pairs), seed, shape, shown))
        for at in range(0, len(pairs), options.per_prompt):
            self._service.submit(reply, pairs[at : at + options.per_prompt])
        return reply

    def _options(self, request: GenerationRequest, echo: list[str] | None) -> ReplyOptions:
        stream = request.stream_options
        return ReplyOptions(
            chat=isinstance(request, ChatRequest),
            stream=bool(request.stream),
            token_ids=bool(request.return_token_ids),
            usage=bool(stream and stream.include_usage),
            running_usage=bool(stream and stream.continuous_usage_stats),
            logprobs=_wants_logprobs(request),
            echo=echo,
            resumed=request.resume_tokens or 0,
            hold=asks_to_hold(request.kv_transfer_params),
            per_prompt=request.n or 1,
            scores_only=checks.scores_only(request),
        )

    def _sequence(
        self,
        request: GenerationRequest,
        reply: Reply,
        prompt: _Prompt,
        index: int,
        seed: int,
        shape: Shape,
        ticket: Ticket | None,
    ) -> tuple[Sequence, Add]:
        model, now = self._model, time.monotonic_ns()
        original = prompt.tokens[: len(prompt.tokens) - prompt.resumed]
        resumed = prompt.tokens[len(original) :]
        params = sampling_params(
            request, len(original), model.limits, model.defaults, seed, shape.grammar
        )
        choice = Choice(
            model.tokenizer,
            model.eos,
            params,
            TextOptions(
                checks.stops(request),
                bool(request.include_stop_str_in_output),
                request.skip_special_tokens is not False,
                shape.tools.markup(model.tokenizer) if shape.tools else frozenset(),
            ),
            resumed,
        )
        if choice.finish is not None or params.max_tokens <= len(resumed):
            raise bad_request(
                f"resume_tokens is {len(resumed)}; the output ended within them already.",
                "resume_tokens",
            )
        id = f"{reply.id}-{index}-{next(self._numbers):x}"
        sequence = Sequence(id, index, original, choice, now)
        if shape.tools is not None:
            sequence.tools = ToolStream(shape.tools, f"{reply.id}-{index}", choice.replayed)
        if params.logprobs is not None or params.prompt_logprobs is not None:
            echoed = original if resumed and reply.options.echo is not None else []
            sequence.explainer = Explainer(model.tokenizer, resumed)
            sequence.offset = (
                Explainer(model.tokenizer, echoed, begins=True).length + sequence.explainer.length
            )
        # Where the prompt's log-probabilities are asked for, all of it is computed.
        wanted = (
            0 if ticket is None or params.prompt_logprobs is not None else ticket.remote_num_tokens
        )
        core = Request(
            id=id,
            prompt=len(prompt.tokens),
            max_tokens=params.max_tokens - len(resumed),
            hashes=prompt.hashes,
            # Further sequences of a request yield to other requests.
            priority=request.priority or int(index > 0 and self._config.order == "priority"),
            arrival=now,
            deadline=NEVER if request.deadline_ms is None
            else now + request.deadline_ms * _MILLISECOND,
            remote=wanted,
            hold=reply.options.hold,
            expiry=salt_expiry(request.cache_salt or ""),
        )  # fmt: skip
        seed_bytes = self._seed(request)
        add = Add(
            request=core,
            tokens=prompt.tokens,
            params=params,
            generated=len(resumed),
            seed=seed_bytes,
            salt=request.cache_salt,
            ticket=None if ticket is None else request.kv_transfer_params,
            grammar=shape.states[index],
            tenure=self._tenure(request),
        )
        return sequence, add

    async def _ticket(self, request: GenerationRequest, prompt: _Prompt) -> Ticket | None:
        """Return the ticket of a second leg; None where there is none, or it is refused."""
        params = request.kv_transfer_params
        if params is None or not offers_blocks(params):
            return None
        tokens, hashes, seed = prompt.tokens, prompt.hashes, self._tenure(request)

        def check() -> Ticket | None:
            return checked_ticket(params, self._key, tokens, hashes, seed)

        return check() if len(tokens) <= LONG else await self._off_loop(check)

    def _tenure(self, request: GenerationRequest) -> bytes:
        """Return the seed of the hashes that tickets name, whether or not anything is cached."""
        return self._model.seed(request.cache_salt or "")


def _wants_logprobs(request: GenerationRequest) -> bool:
    if isinstance(request, ChatRequest):
        return bool(request.logprobs)
    return isinstance(request, CompletionRequest) and request.logprobs not in (None, False)


def _sequences(request: GenerationRequest) -> int:
    """Return how many sequences a request asks for."""
    prompts = checks.prompts(request) if isinstance(request, CompletionRequest) else [None]
    return len(prompts) * max(1, request.n or 1)
