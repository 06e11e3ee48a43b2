"""InputProcessor: converts request bodies to engine sequences."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from pigou.kv.hashing import chain
from pigou.kv.tenure import salt_expiry
from pigou.request import NEVER, BlockHashes, Request, SamplingParams, no_hashes
from pigou.text.chat_template import ChatError
from pigou.text.reasoning import FAMILIES, Reasoning, begins_inside
from pigou.text.tool_calls import open_reasoning
from pigou.tracing.request_trace import RequestTrace
from pigou.wire import request_validation
from pigou.wire.errors import APIError, bad_request
from pigou.wire.openai_requests import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    PoolingRequest,
)
from pigou.wire.prefill_decode_legs import asks_to_hold, offers_blocks
from pigou.wire.sampling_params import sampling_params
from pigou.worker.adapters import name_of
from pigou.worker.config import WorkerConfig
from pigou.worker.engine_thread.commands import Add
from pigou.worker.engine_thread.engine_client import EngineClient
from pigou.worker.http.prefiller import Prefillers
from pigou.worker.http.reply import Reply, ReplyOptions, ReplySequence
from pigou.worker.http.sequence_output import (
    Explainer,
    MessageStream,
    SequenceOutput,
    TextOptions,
    Tools,
)
from pigou.worker.http.served_model import ServedModel
from pigou.worker.http.structured_output_pool import (
    GrammarSource,
    OutputConstraint,
    OutputConstraints,
)
from pigou.worker.kv_transfer.transfer_params import TransferParams, checked_transfer_params

#: Max sequences per request.
MAX_SEQUENCES = 1024
_MILLISECOND = 1_000_000
#: Longer texts (characters) and prompts (tokens) are processed off the event loop.
LONG = 4096
#: Final prompt tokens searched for an opened reasoning block.
_PROMPT_END = 24
_T = TypeVar("_T")
_G = TypeVar("_G", bound=GenerationRequest)


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Shared inputs of a request's sequences."""

    request: GenerationRequest
    shape: OutputConstraint
    ticket: TransferParams | None  # verified, of a worker that has the prompt's blocks
    trace: RequestTrace | None = None
    reasoning: Reasoning | None = None  # for a chat with a model that reasons
    tenant: str = ""  # as the gateway marks it


class InputProcessor:
    """Converts requests to sequences; raises `APIError` for fields that cannot be honoured."""

    def __init__(
        self, model: ServedModel, config: WorkerConfig, service: EngineClient,
        grammars: GrammarSource, key: bytes = b"",
    ) -> None:  # fmt: skip
        """`key` verifies other workers' tickets; empty accepts unsigned ones."""
        self._key = key
        self._model = model
        self._config = config
        self._shapes = OutputConstraints(
            grammars, model, flexible=config.json_whitespace == "flexible"
        )
        self._service = service
        self._numbers = itertools.count()
        self.prompts = PromptProcessor(model, config)
        self.prefillers = Prefillers(config.prefiller_networks)

    async def completion(
        self, request: CompletionRequest, request_id: str, tenant: str = "",
        trace: RequestTrace | None = None,
    ) -> Reply:  # fmt: skip
        """Start a completion; grammars compile fairly by `tenant`, else by `cache_salt`."""
        request = self._check(request)
        sources = request_validation.prompts(request)
        count = len(sources) * (request.n or 1)
        if count > MAX_SEQUENCES:
            raise bad_request(
                f"prompt and n ask for {count} sequences; at most {MAX_SEQUENCES} work in one "
                "request.",
                "prompt",
            )
        special = request.add_special_tokens is not False
        prompts = [await self.prompts.prompt(request, source, special) for source in sources]
        echo = [self.prompts.echo(prompt) for prompt in prompts] if request.echo else None
        inputs = await self._inputs(request, prompts, tenant, trace)
        return self._begin(inputs, f"cmpl-{request_id}", prompts, echo)

    async def chat(
        self, request: ChatRequest, request_id: str, tenant: str = "",
        trace: RequestTrace | None = None,
    ) -> Reply:  # fmt: skip
        """Start a chat completion (see `completion`)."""
        request = self._check(request)
        tools = self._shapes.tools(request)
        prompts = [await self.prompts.prompt(request, *self.prompts.source(request))]
        inputs = await self._inputs(request, prompts, tenant, trace, tools)
        return self._begin(inputs, f"chatcmpl-{request_id}", prompts)

    async def _inputs(
        self, request: GenerationRequest, prompts: list[TokenizedPrompt], tenant: str,
        trace: RequestTrace | None, tools: Tools | None = None,
    ) -> _Inputs:  # fmt: skip
        if trace is not None:
            trace.phase("tokenize")
        count, output = len(prompts) * (request.n or 1), prompts[0].output
        reasoning = self.prompts.reasoning(request, prompts[0])
        shape = await self._shapes.shape(request, count, output, tenant, tools, reasoning)
        ticket = await self._ticket(request, prompts[0])
        return _Inputs(request, shape, ticket, trace, reasoning, tenant)

    async def cached(self, request: CompletionRequest | ChatRequest) -> Request:
        """Return the cache identity of a prompt, computing nothing."""
        self._service.check_open()
        request = self._with_version(request)
        prompt = await self.prompts.prompt(request, *self.prompts.source(request))
        return Request(
            id=f"lend-{next(self._numbers):x}", prompt=len(prompt.tokens), max_tokens=1,
            hashes=prompt.hashes, expiry=salt_expiry(request.cache_salt or ""),
        )  # fmt: skip

    def check_model(self, name: str | None) -> None:
        """Raise `APIError` 404 unless `name` is this worker's model or one of its adapters."""
        adapters = self._model.adapters
        if adapters is not None and name in adapters.served:
            return
        if name is not None and name != self._model.name:
            why = f"The model {name[:80]!r} does not exist; this one serves {self._model.name!r}."
            raise APIError(404, why, "model")

    def _with_version(self, request: _G) -> _G:
        """Check the model's name; replace an adapter's by its version, for the whole request."""
        self.check_model(request.model)
        version = self._model.version(request.model)
        return msgspec.structs.replace(request, model=version) if version else request

    def close(self) -> None:
        """Stop the threads."""
        self.prompts.close()

    # --- checks -----------------------------------------------------------------------------

    def _check(self, request: _G) -> _G:
        self._service.check_open()
        request = self._with_version(request)
        request_validation.check(request)
        self._check_queue(request)
        self._check_order(request)
        if asks_to_hold(request.kv_transfer_params) and (request.stream or _sequences(request) > 1):
            why = "kv_transfer_params.do_remote_decode needs one prompt, n of 1, and no stream."
            raise bad_request(why, "kv_transfer_params")
        return request

    def _check_queue(self, request: GenerationRequest) -> None:
        waiting = self._service.waiting
        limit, wanted = self._config.max_waiting, _sequences(request)
        if limit and wanted > max(limit, self._config.max_seqs):
            raise bad_request(
                f"prompt and n ask for {wanted} sequences; {limit} may wait at this worker: send "
                "fewer at once, or start it with a larger --max-waiting.",
                "n" if (request.n or 1) > 1 else "prompt",
            )
        if limit and waiting and waiting + wanted > limit:
            raise APIError(503, f"The queue is full: {waiting} requests wait.", retry_after=1)

    def _check_order(self, request: GenerationRequest) -> None:
        for field, order, is_given in (
            ("priority", "priority", bool(request.priority)),
            ("deadline_ms", "edf", request.deadline_ms is not None),
        ):
            if is_given and self._config.order != order:
                raise bad_request(
                    f"{field} is {getattr(request, field)}; this worker's order is "
                    f"{self._config.order}: start it with --order {order}, or remove the field.",
                    field,
                )

    # --- KV transfer ------------------------------------------------------------------------

    async def _ticket(
        self, request: GenerationRequest, prompt: TokenizedPrompt
    ) -> TransferParams | None:
        """Return a decode leg's ticket; None if absent or rejected."""
        params = request.kv_transfer_params
        if params is None or not offers_blocks(params):
            return None
        tokens, hashes, seed = prompt.tokens, prompt.hashes, self._tenure(request)
        return await self.prompts.compute(
            len(tokens), lambda: checked_transfer_params(params, self._key, tokens, hashes, seed)
        )

    def _tenure(self, request: GenerationRequest) -> bytes:
        """Return the seed of ticket hashes, with or without caching."""
        return self._model.seed(request.cache_salt or "", self._model.version(request.model))

    # --- sequences --------------------------------------------------------------------------

    def _begin(
        self, inputs: _Inputs, id: str, prompts: list[TokenizedPrompt],
        echo: list[str] | None = None,
    ) -> Reply:  # fmt: skip
        request, options = inputs.request, _options(inputs.request, echo)
        name = name_of(self._model.version(request.model)) or self._model.name
        reply = Reply(id, int(time.time()), name, options)
        if inputs.trace is not None:
            inputs.trace.phase("prepare")
        # Choice j of a seeded request equals the same request with seed + j.
        seed = request.seed if request.seed is not None else secrets.randbits(62)
        pairs: list[tuple[ReplySequence, Add]] = []
        for prompt in prompts:
            for sample in range(options.per_prompt):
                pairs.append(self._sequence(inputs, reply, prompt, len(pairs), seed + sample))
        for first in range(0, len(pairs), options.per_prompt):
            self._service.submit(reply, pairs[first : first + options.per_prompt])
        return reply

    def _sequence(
        self, inputs: _Inputs, reply: Reply, prompt: TokenizedPrompt, index: int, seed: int
    ) -> tuple[ReplySequence, Add]:
        shape, now_ns = inputs.shape, time.monotonic_ns()
        params = sampling_params(
            inputs.request, len(prompt.original), self._model.limits, self._model.defaults, seed,
            shape.grammar,
        )  # fmt: skip
        choice = self._choice(inputs, params, prompt.output)
        id = f"{reply.id}-{index}-{next(self._numbers):x}"
        sequence = ReplySequence(id, index, prompt.original, choice, now_ns)
        if shape.tools is not None or inputs.reasoning is not None:
            tag = self.prompts.open_reasoning(inputs.request, prompt) if shape.tools else ""
            sequence.message = MessageStream(
                shape.tools, f"{reply.id}-{index}", choice.replayed, inputs.reasoning,
                "" if inputs.reasoning is not None else tag,
            )  # fmt: skip
        if params.logprobs is not None or params.prompt_logprobs is not None:
            self._explain(sequence, prompt, reply.options)
        return sequence, self._add(inputs, params, prompt, sequence)

    def _choice(
        self, inputs: _Inputs, params: SamplingParams, resumed: list[int]
    ) -> SequenceOutput:
        request, model, tools = inputs.request, self._model, inputs.shape.tools
        options = TextOptions(
            request_validation.stops(request),
            bool(request.include_stop_str_in_output),
            request.skip_special_tokens is not False,
            (tools.markup(model.tokenizer) if tools else frozenset())
            | (model.tokenizer.ids(inputs.reasoning.marks) if inputs.reasoning else frozenset()),
        )
        choice = SequenceOutput(model.tokenizer, model.eos, params, options, resumed)
        if choice.finish is not None or params.max_tokens <= len(resumed):
            why = f"resume_tokens is {len(resumed)}; the output ended within them already."
            raise bad_request(why, "resume_tokens")
        return choice

    def _explain(
        self, sequence: ReplySequence, prompt: TokenizedPrompt, options: ReplyOptions
    ) -> None:
        """Enable logprobs of a sequence, after its resumed tokens."""
        tokenizer, resumed = self._model.tokenizer, prompt.output
        echoed = prompt.original if resumed and options.echo is not None else []
        sequence.explainer = Explainer(tokenizer, resumed)
        sequence.offset = (
            Explainer(tokenizer, echoed, begins=True).length + sequence.explainer.length
        )

    def _add(
        self, inputs: _Inputs, params: SamplingParams, prompt: TokenizedPrompt,
        sequence: ReplySequence,
    ) -> Add:  # fmt: skip
        request, arrival, index = inputs.request, sequence.arrival, sequence.index
        ticket = None if index else inputs.ticket  # one sequence fetches, the others hit
        # Prompt logprobs require computing all of it.
        fetches = ticket is not None and params.prompt_logprobs is None
        deadline_ms, resumed = request.deadline_ms, prompt.resumed
        salt = request.cache_salt or ""
        expiry = salt_expiry(salt)
        core = Request(
            id=sequence.id,
            prompt=len(prompt.tokens),
            max_tokens=params.max_tokens - resumed,
            hashes=prompt.hashes,
            # Further sequences of a request yield to other requests.
            priority=request.priority or int(index > 0 and self._config.order == "priority"),
            arrival=arrival,
            tenant=inputs.tenant,
            deadline=NEVER if deadline_ms is None else arrival + deadline_ms * _MILLISECOND,
            remote=ticket.remote_num_tokens if ticket is not None and fetches else 0,
            hold=asks_to_hold(request.kv_transfer_params),
            expiry=expiry,
            salt="" if expiry == NEVER else salt,
            model=self._model.version(request.model),
        )
        return Add(
            request=core, tokens=prompt.tokens, params=params, generated=resumed,
            seed=self.prompts.cache_seed(request), salt=request.cache_salt,
            ticket=None if ticket is None else request.kv_transfer_params,
            grammar=inputs.shape.states[index], tenure=self._tenure(request),
            trace_id="" if inputs.trace is None else inputs.trace.context.trace_id,
        )  # fmt: skip


def _options(request: GenerationRequest, echo: list[str] | None) -> ReplyOptions:
    stream = request.stream_options
    return ReplyOptions(
        chat=isinstance(request, ChatRequest), stream=bool(request.stream),
        token_ids=bool(request.return_token_ids), usage=bool(stream and stream.include_usage),
        running_usage=bool(stream and stream.continuous_usage_stats),
        logprobs=wants_logprobs(request), echo=echo, resumed=request.resume_tokens or 0,
        keep_blocks=asks_to_hold(request.kv_transfer_params), per_prompt=request.n or 1,
        scores_only=request_validation.scores_only(request),
    )  # fmt: skip


def _sequences(request: GenerationRequest) -> int:
    prompts = (
        request_validation.prompts(request) if isinstance(request, CompletionRequest) else [None]
    )
    return len(prompts) * max(1, request.n or 1)


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """Tokens of one prompt, resumed ones included."""

    tokens: list[int]  # ids, resumed ones included
    resumed: int  # trailing tokens that were generated elsewhere
    text: str | None  # tokenized text; None for token ids or a truncated prompt
    hashes: BlockHashes  # hashes of full blocks, shape (n, 2); empty if it must not hit the cache

    @property
    def original(self) -> list[int]:
        """Tokens without the resumed ones."""
        return self.tokens[: len(self.tokens) - self.resumed]

    @property
    def output(self) -> list[int]:
        """The resumed tokens."""
        return self.tokens[len(self.tokens) - self.resumed :]


class PromptProcessor:
    """Renders, tokenizes and hashes prompts; long ones on its own threads."""

    def __init__(self, model: ServedModel, config: WorkerConfig) -> None:
        self._model = model
        self._config = config
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="tokenize")

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def compute(self, size: int, call: Callable[[], _T]) -> _T:
        """Return `call()`, run on a thread if more than `LONG` characters or tokens take part."""
        if size <= LONG:
            return call()
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)

    # --- text and tokens --------------------------------------------------------------------

    def source(self, request: CompletionRequest | ChatRequest) -> tuple[str | list[int], bool]:
        """Return a request's prompt, and whether to add special tokens to its text."""
        if isinstance(request, ChatRequest):
            source = request.prompt_token_ids or self.render(request)
            return source, bool(request.add_special_tokens)
        prompts = request_validation.prompts(request)
        if len(prompts) != 1:
            raise bad_request(f"prompt has {len(prompts)} prompts; ask for one.", "prompt")
        return prompts[0], request.add_special_tokens is not False

    def render(self, request: Any) -> str:
        """Render a chat's prompt; raises APIError 400 without a template or on invalid messages."""
        template = self._model.template
        if template is None:
            why = f"The model {self._model.name} has no chat template: use /v1/completions."
            raise bad_request(why, "messages")
        messages, variables = request.messages, _template_variables(request)
        try:
            if not self._config.allow_special_tokens:
                guard = self._model.tokenizer.control.guard
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
        """Tokenize a text, long ones off the event loop; raises APIError 400 if too long."""
        context = self._model.limits.max_model_len
        max_characters = context * self._model.tokenizer.vocabulary.max_token_bytes
        if len(text) > max_characters:
            raise bad_request(
                f"The prompt has {len(text)} characters, more than {max_characters}, which is "
                f"what the model's context of {context} tokens could hold at most.",
                "prompt",
            )
        encode = self._model.tokenizer.encode
        return await self.compute(len(text), lambda: encode(text, special))

    async def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens, control tokens included; raises APIError 400 on a bad id."""
        self._check_vocabulary(tokens, "tokens")
        decode = self._model.tokenizer.decode
        return await self.compute(len(tokens), lambda: decode(tokens, skip_special=False))

    def echo(self, prompt: TokenizedPrompt) -> str:
        """Return a prompt's text, without resumed tokens."""
        if prompt.text is not None:
            return prompt.text
        return self._model.tokenizer.decode(prompt.original)

    def open_reasoning(self, request: GenerationRequest, prompt: TokenizedPrompt) -> str:
        """Return the tag of a reasoning block that a chat's prompt leaves open; "" for none."""
        return open_reasoning(*self._prompt_end(request, prompt))

    def reasoning(self, request: GenerationRequest, prompt: TokenizedPrompt) -> Reasoning | None:
        """Return how replies to a chat reason; None if they do not."""
        name = self._model.reasoning
        if name is None or not isinstance(request, ChatRequest):
            return None
        inside = begins_inside(FAMILIES[name], *self._prompt_end(request, prompt))
        return Reasoning(name, inside, request.include_reasoning is not False)

    def _prompt_end(
        self, request: GenerationRequest, prompt: TokenizedPrompt
    ) -> tuple[str, str | None]:
        """Return the end of a prompt, and the final message that its reply continues, if any."""
        final = None
        if isinstance(request, ChatRequest) and request.continue_final_message:
            content = request.messages[-1].get("content")
            parts = content if isinstance(content, list) else [content]
            final = "".join(str(p.get("text", "") if isinstance(p, dict) else p) for p in parts)
        end = self._model.tokenizer.decode(prompt.original[-_PROMPT_END:], skip_special=False)
        return end, final

    # --- prompts ----------------------------------------------------------------------------

    async def prompt(
        self, request: GenerationRequest, source: str | list[int], special: bool
    ) -> TokenizedPrompt:
        """Build the prompt from text or token ids; raises APIError 400 if it is invalid."""
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
        """Return the seed of the block hashes; empty without caching or under an expired tenure."""
        salt = request.cache_salt or ""
        if not self._config.prefix_caching or salt_expiry(salt) <= time.time_ns():
            return b""
        return self._model.seed(salt, self._model.version(request.model))

    async def _hashes(self, tokens: list[int], request: GenerationRequest) -> BlockHashes:
        echoed = isinstance(request, CompletionRequest) and bool(request.echo)
        seed, size = self.cache_seed(request), self._config.block_size
        averaged = isinstance(request, PoolingRequest) and request.pooling == "mean"
        if not seed or averaged or (echoed and wants_logprobs(request)):
            return no_hashes()
        return await self.compute(len(tokens), lambda: chain(tokens, size, seed))

    def _check_vocabulary(self, tokens: list[int], field: str) -> None:
        size, largest = self._model.limits.vocab_size, max(tokens, default=0)
        if largest >= size:
            raise bad_request(
                f"{field} has the token id {largest}; the vocabulary has {size} tokens.", field
            )


def wants_logprobs(request: GenerationRequest) -> bool:
    """Return True if a request asks for output logprobs."""
    if isinstance(request, ChatRequest):
        return bool(request.logprobs)
    return isinstance(request, CompletionRequest) and request.logprobs not in (None, False)


def _template_variables(request: Any) -> dict[str, Any]:
    variables = dict(request.chat_template_kwargs or {})
    if getattr(request, "reasoning_effort", None) is not None:
        variables["reasoning_effort"] = request.reasoning_effort
    if request.tools and getattr(request, "tool_choice", None) != "none":
        variables["tools"] = request.tools
    if reserved := {"messages", "add_generation_prompt"} & variables.keys():
        why = f"chat_template_kwargs has {', '.join(sorted(reserved))}; that is a field of its own."
        raise bad_request(why, "chat_template_kwargs")
    return variables
