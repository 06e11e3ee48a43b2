"""A client's request: the parsed body, and its run through the fleet."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import msgspec
from tokenizers import Tokenizer

from pigou.control.messages import Choice
from pigou.gateway.auth.keys import NO_QUOTA, RequestQuota
from pigou.gateway.caches.layers import AnswerLookup
from pigou.gateway.proxy.reply_parsing import ABSENT
from pigou.objectives import Objectives, Slo
from pigou.request import NEVER, SECOND, BlockKeys, Request
from pigou.tracing.request_trace import RequestTrace
from pigou.tracing.trace_context import TRACEPARENT, header_lines
from pigou.windows.builder import ComputedPrompt, MeteredRequest
from pigou.wire.bodies import REPLIES, ByteReservation
from pigou.wire.chat_translation import ChatTranslation
from pigou.wire.errors import APIError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_MILLISECOND = 1_000_000
#: Fields of a JSON body, the untouched ones still encoded (`msgspec.Raw`).
Body: TypeAlias = dict[str, Any]


class RequestedStreamOptions(msgspec.Struct):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class RequestedFormat(msgspec.Struct):
    """Relevant part of `response_format`."""

    type: str = "text"


class BodyFields(msgspec.Struct):
    """Body of either route; `None` for absent fields."""

    model: str | None = None
    stream: bool | None = None
    stream_options: RequestedStreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    logprobs: bool | int | None = None
    prompt_logprobs: int | None = None
    echo: bool | None = None
    response_format: RequestedFormat | None = None
    structured_outputs: Any = None
    return_token_ids: bool | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    priority: int | None = None
    deadline_ms: int | None = None
    # sources of the prompt's tokens.
    prompt: Any = None
    messages: msgspec.Raw = ABSENT
    prompt_token_ids: list[int] | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Any = None
    tools: list[Any] | None = None
    tool_choice: Any = None

    def scores_prompt(self, chat: bool) -> bool:
        """True if prompt log-probabilities are wanted: decode then computes all of it."""
        if self.prompt_logprobs is not None:
            return True
        return not chat and bool(self.echo) and self.logprobs not in (None, False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """A client's request: checked body and headers."""

    id: str  # unique among the gateway's requests
    wire_id: str  # `X-Request-Id` of both legs, from which workers make the reply's id
    chat: bool  # whether it came to the chat route
    stream: bool
    body: Body = field(repr=False)
    fields: BodyFields = field(default_factory=BodyFields, repr=False)
    prompt_tokens: int  # total over all prompts, estimated from the text's length
    max_tokens: int  # estimated if the client did not say
    single: bool = True  # one prompt and one choice: can have two legs, and migrate
    splits: bool = True  # the prompt may be computed on another worker
    portable: bool = True  # can migrate by prompt and tokens alone (to a stock vLLM)
    seeded: bool = False  # the client gave a seed
    wants_ids: bool = False  # token ids
    wants_usage: bool = False  # a last chunk with the usage
    tenant: str = ""  # empty without keys
    priority: int = 0  # lower goes first
    deadline_ms: int | None = None  # from the arrival to the first token
    arrival: int = 0  # nanoseconds of the gateway's clock
    salt: str = ""  # the cache salt that workers are sent; empty for none
    expiry: int = NEVER  # when what is cached under it becomes void, in nanoseconds since 1970
    overrides: Mapping[str, float] = field(default_factory=dict)  # parameters of the routing policy
    unknown: Sequence[str] = ()  # fields that no worker knows, left out of the body
    choices: int = 1  # sequences for each prompt (`n`)
    prompts: Sequence[Any] = (None,)  # as the client sent them; None for the one of a chat
    group: str = ""  # id of the request that it is one sequence of; empty for one that is alone
    adapter: str = ""  # name of the adapter that it asks for; empty for the model itself

    @property
    def sequences(self) -> int:
        """Choices of all prompts."""
        return self.choices * len(self.prompts)

    @property
    def token_limit(self) -> int:
        """Maximum of tokens of all choices together; 0 if unknown."""
        wanted = self.fields.max_completion_tokens
        wanted = self.fields.max_tokens if wanted is None else wanted
        return max(1, wanted) * self.sequences if wanted else 0

    @property
    def path(self) -> str:
        """Route of the request."""
        return CHAT if self.chat else COMPLETIONS

    @property
    def own_seed(self) -> int:
        """Seed if the client gave none: the same in every attempt."""
        return int(self.id, 16) & 0x7FFF_FFFF_FFFF_FFFF

    def left_ms(self, now: int) -> int:
        """Return the milliseconds to its deadline at `now` (gateway's clock), at least 0."""
        return max(0, (self.deadline_ms or 0) - (now - self.arrival) // _MILLISECOND)


@dataclass(slots=True)
class RequestStats:
    """Tokens, times and worker of a request so far, over all sequences."""

    first_token: int = 0  # when it was passed on, in nanoseconds of the gateway's clock; 0 before
    prompt_tokens: int = 0  # tokens of all prompts; 0 while unknown
    completion_tokens: int = 0
    worker: str | None = None  # id of the last worker that decoded it
    finish_reasons: tuple[str, ...] = ()  # one per ended sequence; only if traced

    def add(self, prompt_tokens: int, completion_tokens: int) -> None:
        """Add a sequence's totals."""
        self.prompt_tokens += prompt_tokens
        self.completion_tokens += completion_tokens


class TokenPrompt(NamedTuple):
    """A prompt's token ids, and the tokenizer that made them."""

    ids: list[int]
    backend: Tokenizer


@dataclass(slots=True, kw_only=True)
class GatewayRun:
    """A request, or one of its sequences, on its way through the fleet."""

    parsed: ParsedRequest
    body: Body = field(repr=False)  # with token ids of the prompt once they are known
    prompt_tokens: int  # a guess until they are known
    # the router's keys of the prompt's blocks, by block size; none while unknown.
    keys: Mapping[int, BlockKeys] = field(default_factory=dict, repr=False)
    # the prompt for workers that take token ids; None to send text.
    token_prompt: TokenPrompt | None = field(default=None, repr=False)
    # words and marks of the prompt's text, where output lengths are predicted by them.
    features: tuple[float, ...] = field(default=(), repr=False)
    cached: int | None = None  # prompt tokens that the worker of leg 1 had; None without one
    choice: Choice | None = None  # the workers that it was sent to last; None before
    held: int = 0  # sequences of the same request that are still to be sent
    held_tokens: int = 0
    quota: RequestQuota = field(default=NO_QUOTA, repr=False)  # share of the key's limits
    on_route: Callable[[Choice], None] | None = field(default=None, repr=False)
    payer: str = ""  # payer of the key; empty for its tenant
    overflow: str = ""  # the model that was asked for, where another one serves it
    lookup: AnswerLookup | None = field(default=None, repr=False)  # None if not to be cached
    budget_headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    dropped: str = ""  # parts of its compiled context, where its client sent one
    advice: str = ""  # on the beginning of its prompt, where its client asked for some
    workload: str = ""  # name of its class; empty without one
    degraded: tuple[str, ...] = ()  # modes that its answer has less by
    trace: RequestTrace | None = field(default=None, repr=False)
    # the client's, passed on to workers where tracing is off.
    trace_headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    # shared by its sequences: tokens and times, metering, budget of the replies.
    stats: RequestStats = field(default_factory=RequestStats, repr=False)
    metered: MeteredRun | None = field(default=None, repr=False)
    reply_bytes: ByteReservation = field(default_factory=REPLIES.reserve, repr=False)
    translation: ChatTranslation | None = field(default=None, repr=False)  # for another API

    @classmethod
    def of(cls, parsed: ParsedRequest, **shared: Any) -> GatewayRun:
        """Return the run of a parsed request."""
        return cls(parsed=parsed, body=parsed.body, prompt_tokens=parsed.prompt_tokens, **shared)

    @property
    def load(self) -> tuple[int, int]:
        """Number of sequences, and tokens of each, prompt and output."""
        parsed = self.parsed
        return parsed.sequences, self.prompt_tokens // len(parsed.prompts) + parsed.max_tokens

    @property
    def ttft_s(self) -> float | None:
        """TTFT; None before it, or for a reply in one piece."""
        first_ns = self.stats.first_token
        return (first_ns - self.parsed.arrival) / SECOND if first_ns else None

    @property
    def outgoing(self) -> str:
        """Trace context as header lines for workers; may be empty."""
        return header_lines(self.trace_headers) if self.trace is None else self.trace.outgoing

    @property
    def traceparent(self) -> str:
        """Trace context as a header value."""
        if self.trace is None:
            return self.trace_headers.get(TRACEPARENT, "")
        return self.trace.context.header(self.trace.leg_id)

    @property
    def trace_id(self) -> str:
        """Trace id; empty without a trace."""
        return "" if self.trace is None else self.trace.context.trace_id

    @property
    def account(self) -> str:
        """Its payer, or else its tenant."""
        return self.payer or self.parsed.tenant

    def request(self, generated: int = 0, eligible: frozenset[str] = frozenset()) -> Request:
        """Return the request for ControlPlane, with `generated` tokens in its prompt."""
        parsed = self.parsed
        wanted = parsed.deadline_ms
        return Request(
            id=parsed.id,
            prompt=self.prompt_tokens + generated,
            max_tokens=max(1, parsed.max_tokens - generated),
            priority=parsed.priority,
            arrival=parsed.arrival,
            deadline=NEVER if wanted is None else parsed.arrival + wanted * _MILLISECOND,
            tenant=parsed.tenant,
            keys=self.keys,
            overrides=parsed.overrides,
            streamed=parsed.stream,
            splits=parsed.splits,
            sequences=parsed.sequences,
            group=parsed.group,
            held=self.held,
            held_tokens=self.held_tokens,
            model=parsed.adapter,
            eligible=eligible,
            features=self.features,
            payer=self.payer,
            workload=self.workload,
        )


class StreamCount:
    """Tokens of one stream so far."""

    def __init__(self) -> None:
        self.counted = 0  # tokens of all choices
        self.last_token_ns = 0  # when the last came, by the gateway's clock; 0 before


class MeteredRun:
    """Tokens and times of a request; keeps nothing of the request after its end."""

    __slots__ = (
        "_counted", "_ended", "_headers", "_run", "computed", "computed_ns", "error",
        "first_token_ns", "moves", "relays",
    )  # fmt: skip

    def __init__(self, run: GatewayRun, headers: Mapping[str, str]) -> None:
        self._run = run
        self.first_token_ns = 0  # when its first token was passed on; 0 before
        self.computed_ns = 0  # when the prefill worker was done; 0 before, or without one
        self.computed: ComputedPrompt | None = None  # once the prompt was computed
        self.moves = 0  # attempts that failed
        self.relays: list[StreamCount] = []
        self.error: APIError | None = None
        self._headers = headers
        self._counted = 0
        self._ended: MeteredRequest | None = None

    def begun(self, worker: str, uncached: int | None) -> None:
        """Record the first token, and the uncached prompt tokens."""
        self.first_token_ns = self.first_token_ns or time.monotonic_ns()
        if self.computed is None and uncached is not None and not self.moves:
            at_ns = self.computed_ns or self.first_token_ns
            self.computed = ComputedPrompt(worker, self._run.prompt_tokens, max(uncached, 1), at_ns)

    @property
    def is_over(self) -> bool:
        """True after its end."""
        return self._ended is not None

    @property
    def tokens(self) -> int:
        """Tokens received so far."""
        if self._ended is not None:
            return self._ended.output_tokens
        if self.relays:
            return sum(relay.counted for relay in self.relays)
        return self._run.stats.completion_tokens

    @property
    def account(self) -> str:
        """Payer, or tenant, of an open request."""
        return self._run.account

    @property
    def work(self) -> int:
        """Prompt and output tokens of an open request so far."""
        return self._run.prompt_tokens + self.tokens

    def name(self, objectives: Objectives, model: str) -> str:
        """Return its workload class."""
        if self._ended is not None:
            return self._ended.workload
        run = self._run
        return objectives.name_of(run.parsed.tenant, run.prompt_tokens, self._headers, model)

    def end(
        self, now: int, objectives: Objectives, model: str, *, done: bool, counts: bool
    ) -> MeteredRequest:
        """Record the end; return its record for a window."""
        open_request = self.metered(objectives, model)
        self._ended = open_request._replace(
            ended_ns=now, is_done=done, is_offered=counts,
            is_attained=done and self._is_inside(objectives.slo_of(open_request.workload), now),
        )  # fmt: skip
        self.relays.clear()
        del self._run
        return self._ended

    def fresh_tokens(self) -> int:
        """Return the tokens since the last call."""
        tokens, counted = self.tokens, self._counted
        self._counted = tokens
        return tokens - counted

    def metered(self, objectives: Objectives, model: str) -> MeteredRequest:
        """Return its record for a planner's window."""
        if self._ended is not None:
            return self._ended
        run = self._run
        return MeteredRequest(
            self.name(objectives, model), run.prompt_tokens, run.parsed.arrival, run.parsed.arrival,
            self.first_token_ns if run.parsed.stream else 0, 0, self.tokens, self._itl_ns(),
            computed=self.computed,
        )  # fmt: skip

    def _is_inside(self, slo: Slo | None, now: int) -> bool:
        """True if it met its objective; whole replies by a stream's time."""
        run, itl_ns = self._run, self._itl_ns()
        if slo is None:
            return True
        if not run.parsed.stream:
            gaps = max(self.tokens - 1, 0)
            limit_s = slo.ttft_s + (gaps * slo.itl_s if gaps else 0.0)
            return (now - run.parsed.arrival) / SECOND <= limit_s
        if not self.first_token_ns:
            return False
        ttft_s = (self.first_token_ns - run.parsed.arrival) / SECOND
        return slo.attained(ttft_s, None if itl_ns is None else itl_ns / SECOND)

    def _itl_ns(self) -> float | None:
        gaps = [
            (relay.last_token_ns - self.first_token_ns) / (relay.counted - 1)
            for relay in self.relays
            if relay.counted > 1
        ]
        return sum(gaps) / len(gaps) if gaps else None
