"""What the gateway itself reads of a body; the rest is the worker's to judge."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from pigou.control.messages import Choice
from pigou.gateway.proxy.reply_parsing import ABSENT
from pigou.request import NEVER, BlockKeys, Request
from pigou.tracing.trace_context import TRACEPARENT, header_lines
from pigou.wire.bodies import REPLIES, ByteReservation

if TYPE_CHECKING:
    from pigou.gateway.auth.keys import RequestQuota
    from pigou.gateway.request_meter import MeteredCall
    from pigou.tracing.request_trace import RequestTrace


class RequestedStreamOptions(msgspec.Struct):
    """What a stream carries besides text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class RequestedFormat(msgspec.Struct):
    """`response_format`, as far as it matters here."""

    type: str = "text"


class BodyFields(msgspec.Struct):
    """A body of either route; `None` means that a field was not given."""

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
    # What the prompt's tokens are made of.
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
        """Whether the prompt's log-probabilities are wanted.

        Then the worker that decodes must compute all of it, cached or not.
        """
        if self.prompt_logprobs is not None:
            return True
        return not chat and bool(self.echo) and self.logprobs not in (None, False)


#: Fields of a JSON body, the untouched ones still encoded (`msgspec.Raw`).
Body: TypeAlias = dict[str, Any]

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
_MILLISECOND = 1_000_000


@dataclass(slots=True)
class RequestStats:
    """Tokens, times and worker of a request so far, all its sequences together."""

    # when the first token was passed on, in nanoseconds of the gateway's clock; 0 before.
    first_token: int = 0
    prompt_tokens: int = 0  # of its prompts; 0 while unknown
    completion_tokens: int = 0
    worker: str | None = None  # id of the last worker that decoded it
    # of the sequences that have ended; only of a request that is traced.
    finish_reasons: tuple[str, ...] = ()

    def add(self, prompt_tokens: int, completion_tokens: int) -> None:
        """A sequence ended, or another part of it."""
        self.prompt_tokens += prompt_tokens
        self.completion_tokens += completion_tokens


@dataclass(slots=True)
class GatewayRequest:
    """One request of a client."""

    id: str  # unique among the gateway's requests
    wire_id: str  # `X-Request-Id` of both legs, from which workers make the reply's id
    chat: bool  # whether it came to the chat route
    stream: bool  # whether the client wants a stream
    body: Body = field(repr=False)
    prompt: int  # tokens of the prompt; a guess from the text's length until they are known
    max_tokens: int  # most tokens to generate, a guess where the client did not say
    single: bool = True  # one prompt and one choice: can be split in two legs, and go on elsewhere
    splits: bool = True  # the prompt may be computed on another worker
    # can go on where only prompt and tokens so far are understood (a stock vLLM).
    portable: bool = True
    seeded: bool = False  # the client gave a seed
    wants_ids: bool = False  # the client wants token ids
    wants_usage: bool = False  # the client wants a last chunk with the usage
    tenant: str = ""  # who asks; empty without keys
    priority: int = 0  # lower goes first
    # milliseconds after the arrival by which the first token is wanted.
    deadline_ms: int | None = None
    arrival: int = 0  # nanoseconds of the gateway's clock
    salt: str = ""  # the cache salt that workers are sent; empty for none
    expiry: int = NEVER  # when what is cached under it becomes void, in nanoseconds since 1970
    # the body's fields that the gateway reads.
    fields: BodyFields = field(default_factory=BodyFields, repr=False)
    # the router's keys of the prompt's blocks, by block size; none while unknown.
    keys: Mapping[int, BlockKeys] = field(default_factory=dict, repr=False)
    # parameters of the routing policy, for this request.
    overrides: Mapping[str, float] = field(default_factory=dict)
    unknown: Sequence[str] = ()  # names of fields that no worker knows, left out of the body
    # tokens of the prompt that the worker of leg 1 had cached; None without one.
    cached: int | None = None
    choice: Choice | None = None  # the workers that it was sent to last; None before
    # tokens and times so far, shared by its sequences.
    stats: RequestStats = field(default_factory=RequestStats, repr=False)
    choices: int = 1  # sequences for each prompt (`n`)
    prompts: Sequence[Any] = (None,)  # as the client sent them; None for the one of a chat
    group: str = ""  # id of the request that it is one sequence of; empty for one that is alone
    held: int = 0  # sequences of that request that were not sent when this one was
    held_tokens: int = 0
    # what it has of its key's limits; None without.
    quota: RequestQuota | None = field(default=None, repr=False)
    # told of the workers each time that it is sent to some.
    on_route: Callable[[Choice], None] | None = field(default=None, repr=False)
    # what it got so far, shared by its sequences; None where nobody counts.
    metered: MeteredCall | None = field(default=None, repr=False)
    overflow: str = ""  # the model that was asked for, where another one serves it; else empty
    # its spans so far; None where it is not traced.
    trace: RequestTrace | None = field(default=None, repr=False)
    # the client's, passed on to workers where tracing is off.
    trace_headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    advice: str = ""  # on the beginning of its prompt, where its client asked for some; else empty
    adapter: str = ""  # name of the adapter that it asks for; empty for the model itself
    # budget of the replies, shared by all sequences.
    reply_bytes: ByteReservation = field(default_factory=REPLIES.reserve, repr=False)

    @property
    def token_limit(self) -> int:
        """Most tokens that a worker may send, all choices together; 0 where nobody said."""
        fields = self.fields
        given = (fields.max_completion_tokens, fields.max_tokens)
        wanted = next((limit for limit in given if limit is not None), 0)
        return max(1, wanted) * self.choices * len(self.prompts) if wanted else 0

    @property
    def path(self) -> str:
        """The route it came to."""
        return CHAT if self.chat else COMPLETIONS

    @property
    def outgoing(self) -> str:
        """Header lines that say to which trace what a worker does now belongs; may be empty."""
        return header_lines(self.trace_headers) if self.trace is None else self.trace.outgoing

    @property
    def traceparent(self) -> str:
        """The same as the value of a header, where there are no lines."""
        trace = self.trace
        if trace is None:
            return self.trace_headers.get(TRACEPARENT, "")
        return trace.context.header(trace.leg_id)

    @property
    def trace_id(self) -> str:
        """Id of its trace; empty where it is not traced."""
        return "" if self.trace is None else self.trace.context.trace_id

    def current(self, body: Body, now: int) -> Body:
        """Return a body to be sent at `now` (ns since 1970).

        When the request waited past the expiry of its tenure, it has a salt that nobody else
        has: what it would find is void.
        """
        return body if now < self.expiry else {**body, "cache_salt": f"expired-{self.id}"}

    def left_ms(self, now: int) -> int:
        """Return the milliseconds until its deadline at `now` (the gateway's clock), at least 0."""
        wanted = self.deadline_ms or 0
        return max(0, wanted - (now - self.arrival) // _MILLISECOND)

    def request(self, generated: int = 0, eligible: frozenset[str] = frozenset()) -> Request:
        """Return the request for ControlPlane.

        Args:
            generated: tokens that have joined the prompt.
            eligible: ids of the workers that can serve it; empty for all.
        """
        wanted = self.deadline_ms
        return Request(
            id=self.id,
            prompt=self.prompt + generated,
            max_tokens=max(1, self.max_tokens - generated),
            priority=self.priority,
            arrival=self.arrival,
            deadline=NEVER if wanted is None else self.arrival + wanted * _MILLISECOND,
            tenant=self.tenant,
            keys=self.keys,
            overrides=self.overrides,
            streamed=self.stream,
            splits=self.splits,
            sequences=self.choices * len(self.prompts),
            group=self.group,
            held=self.held,
            held_tokens=self.held_tokens,
            model=self.adapter,
            eligible=eligible,
        )
