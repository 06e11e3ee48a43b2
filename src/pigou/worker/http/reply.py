"""Reply: the reply to one HTTP request while it is computed; also its trace."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pigou.request import SECOND
from pigou.runtime.step_output import RankedLogprobs as Report
from pigou.tracing.request_trace import NO_ATTRIBUTES, Attributes, RequestTrace
from pigou.tracing.trace_context import Headers
from pigou.tracing.tracer import Tracer
from pigou.wire import openai_replies
from pigou.wire.errors import APIError
from pigou.wire.openai_replies import Json, LogprobsEntry, ReplyChunk, StreamEncoder, UsageInfo
from pigou.wire.sse import DONE
from pigou.worker.http.sequence_output import Explainer, MessageStream, SequenceOutput

#: Root span name, as in vLLM.
ROOT = "llm_request"
_CHOICE, _TRANSFER = ("pigou.choice",), ("pigou.kv.tokens",)
_STEP = ("pigou.tokens", "pigou.duration_s")
_PREFILL = ("pigou.prompt_tokens", "pigou.computed_tokens", "pigou.steps")
_DECODE = ("pigou.tokens", "pigou.itl_s", "pigou.preemptions")
_REPLY = ("gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.response.model",
          "gen_ai.response.id", "gen_ai.response.finish_reasons", "gen_ai.usage.input_tokens",
          "gen_ai.usage.output_tokens", "gen_ai.usage.cache_read.input_tokens")  # fmt: skip


@dataclass(slots=True)
class ReplySequence:
    """One engine request, as the event loop sees it."""

    id: str
    index: int
    prompt: list[int]  # original token ids
    choice: SequenceOutput
    arrival: int  # submission; all times in monotonic nanoseconds
    begun: int = 0  # first took a row; 0 before
    first: int = 0  # first token; 0 before
    last: int = 0  # last token
    cached: int = 0  # prompt tokens not computed here, other workers' included
    loaded: int = 0  # cached tokens fetched from another worker
    preemptions: int = 0
    explainer: Explainer | None = None  # formats logprobs, if requested
    # one per token so far (the prompt's too, with echo).
    logprobs: list[LogprobsEntry] = field(default_factory=list)
    prompt_logprobs: list[LogprobsEntry] | None = None
    pooled: NDArray[np.float32] | None = None  # hidden states of the prompt, if requested
    text: list[str] = field(default_factory=list)  # text of a non-streamed reply
    offset: int = 0  # text length of the tokens whose logprobs were sent
    opened: bool = False  # a chunk was sent
    message: MessageStream | None = None  # for chats with tools or reasoning
    loading: int = 0  # start of its block transfer; 0 if none or not traced
    # prefill chunks, if traced: begin, end, tokens.
    chunks: Sequence[tuple[int, int, int]] = ()

    @property
    def finish(self) -> str | None:
        """Finish reason for clients; None while running."""
        choice = self.choice
        called = self.message is not None and bool(self.message.calls)
        if called and choice.finish == "stop" and not choice.stopped_by_text:
            return "tool_calls"
        return choice.finish


@dataclass(frozen=True, slots=True)
class ReplyOptions:
    """Optional contents of a reply."""

    chat: bool
    stream: bool = False
    token_ids: bool = False
    usage: bool = False  # at the end of a stream
    running_usage: bool = False  # in every chunk of a stream
    logprobs: bool = False
    echo: list[str] | None = None  # text of each prompt, before the output
    resumed: int = 0  # tokens generated and sent elsewhere
    keep_blocks: bool = False  # hold blocks for another worker, and return their ticket
    per_prompt: int = 1
    scores_only: bool = False  # score the prompt, generate nothing

    @property
    def bare(self) -> bool:
        """True if chunks hold only text."""
        return not (self.token_ids or self.running_usage or self.logprobs)


class Reply:
    """Collects the engine's output for one HTTP request."""

    def __init__(self, id: str, created: int, model: str, options: ReplyOptions) -> None:
        """`created` is Unix time in seconds."""
        self.id = id
        self.created = created
        self.model = model
        self.options = options
        self.sequences: list[ReplySequence] = []
        self.ticket: Json | None = None
        self.error: APIError | None = None
        self.open = 0
        self._stream = StreamEncoder(id, created, model, chat=options.chat)
        self._frames: list[bytes] = []
        self._wake = asyncio.Event()
        self._keep_blocks = options.keep_blocks
        self._text_only = options.stream and options.bare

    # --- what comes in ----------------------------------------------------------------------

    def add(self, sequence: ReplySequence) -> None:
        """Add a sequence."""
        self.sequences.append(sequence)
        self.open += 1

    def take(self, sequence: ReplySequence, token: int, report: Report | None) -> bool:
        """Add a token to a sequence; True if it ends the sequence."""
        if self.options.scores_only:
            self.end(sequence, "length")  # sampled by the scoring step: not output
            return True
        choice, message, delta = sequence.choice, sequence.message, None
        text = choice.take(token)
        ended = choice.finish is not None
        if message is not None:
            delta = message.feed(text, ended)
            ended = ended or (message.is_over and choice.end_at_call())
        elif self._text_only and not ended and sequence.opened:
            self._frames.append(self._stream.text(sequence.index, text))
            self._wake.set()
            return False
        if report is not None and sequence.explainer is not None:
            sequence.logprobs.append(sequence.explainer.explain(report))
        if not self.options.stream:
            sequence.text.append(text)
        # One chunk per token, so that a stream can be resumed elsewhere between chunks.
        elif delta != {} or ended or not self.options.bare:
            self._chunk(sequence, text, [token], delta)
        if ended:
            self._close()
        return ended

    def end(self, sequence: ReplySequence, reason: str) -> None:
        """End a sequence that the engine ended without a final token."""
        text = sequence.choice.end(reason)
        delta = None if sequence.message is None else sequence.message.feed(text, True)
        if self.options.stream:
            self._chunk(sequence, text, [], delta)
        else:
            sequence.text.append(text)
        self._close()

    def fail(self, error: APIError) -> None:
        """End the reply with an error."""
        self.error = self.error or error
        self._wake.set()

    def hand_over(self, ticket: Json | None) -> None:
        """Record that the engine finished the request; `ticket` names its held blocks."""
        self.ticket = ticket or self.ticket
        self._keep_blocks = False
        if self.done:
            self._wake.set()

    def _close(self) -> None:
        self.open -= 1
        if self.done or self.options.stream:
            self._wake.set()

    # --- what goes out ----------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """True if the reply is complete."""
        return self.error is not None or (self.open == 0 and not self._keep_blocks)

    async def complete(self) -> None:
        """Wait for the end; raises the error that ended the reply."""
        while not self.done:
            await self.wait()
        if self.error is not None:
            raise self.error

    async def wait(self) -> None:
        """Wait for stream frames or the end."""
        await self._wake.wait()
        self._wake.clear()

    def take_frames(self) -> bytes:
        """Return and clear the pending frames."""
        frames, self._frames = self._frames, []
        return b"".join(frames)

    def opening(self) -> bytes:
        """Return a stream's opening frames."""
        if not self.options.chat or self.options.resumed:
            return b""
        return b"".join(self._role(sequence) for sequence in self.sequences)

    def closing(self) -> bytes:
        """Return a stream's closing frames, after the last choice."""
        usage = self._stream.usage(self.usage()) if self.options.usage else b""
        return usage + DONE

    def usage(self) -> UsageInfo:
        """Return the usage of the whole reply."""
        parsed = [one.message for one in self.sequences if one.message is not None]
        counts = [one.reasoning_tokens for one in parsed if one.reasoning_tokens is not None]
        return openai_replies.usage(*self.token_counts(), sum(counts) if counts else None)

    def token_counts(self) -> tuple[int, int, int]:
        """Return the prompt, output and cached tokens of the whole reply."""
        firsts = self.sequences[:: self.options.per_prompt]
        prompt = sum(len(sequence.prompt) for sequence in firsts)
        output = sum(sequence.choice.count for sequence in self.sequences)
        return prompt, output, sum(min(one.cached, len(one.prompt)) for one in firsts)

    def body(self) -> bytes:
        """Return the JSON body of a non-streamed reply."""
        chat, first = self.options.chat, self.sequences[0]
        ids = first.prompt if self.options.token_ids else None
        prompt = {"prompt_logprobs": _prompt_logprobs(first), "prompt_token_ids": ids}
        choice = self._chat_choice if chat else self._completion_choice
        return openai_replies.whole(
            "chat.completion" if chat else "text_completion", self.id, self.created, self.model,
            [choice(sequence) for sequence in self.sequences],
            usage=self.usage(), ticket=self.ticket, **(prompt if chat else {}),
        )  # fmt: skip

    # --- details ----------------------------------------------------------------------------

    def _role(self, sequence: ReplySequence) -> bytes:
        usage = self._running_usage(sequence, 0)
        ids = sequence.prompt if self.options.token_ids else None
        return self._stream.role(sequence.index, ids, usage)

    def _running_usage(self, sequence: ReplySequence, count: int) -> UsageInfo | None:
        if not self.options.running_usage:
            return None
        return openai_replies.usage(len(sequence.prompt), count)

    def _chunk(
        self, sequence: ReplySequence, text: str, tokens: list[int], delta: Json | None = None
    ) -> None:
        choice, options = sequence.choice, self.options
        first, sequence.opened = not sequence.opened, True
        logprobs = None
        if options.logprobs:
            taken, sequence.logprobs = sequence.logprobs, []
            logprobs = self._logprobs(sequence, taken)
        if first:
            text = self._echo(sequence) + text
        chunk = ReplyChunk(
            text=text, delta=delta, finish=sequence.finish, stop=choice.stop,
            token_ids=tokens if options.token_ids else None, logprobs=logprobs,
            usage=self._running_usage(sequence, choice.count),
        )  # fmt: skip
        if first and options.token_ids and not options.chat:
            chunk.prompt_token_ids = sequence.prompt
        self._frames.append(self._stream.chunk(sequence.index, chunk))
        self._wake.set()

    def _echo(self, sequence: ReplySequence) -> str:
        """Return the text before a sequence's output."""
        echo, options = self.options.echo, self.options
        return "" if echo is None or options.resumed else echo[sequence.index // options.per_prompt]

    def _logprobs(self, sequence: ReplySequence, taken: list[LogprobsEntry]) -> Json:
        if self.options.chat:
            return openai_replies.chat_logprobs(taken)
        shaped = openai_replies.completion_logprobs(taken, sequence.offset)
        sequence.offset += sum(len(token.text) for token in taken)
        return shaped

    def _completion_choice(self, sequence: ReplySequence) -> Json:
        choice, options = sequence.choice, self.options
        text = self._echo(sequence) + "".join(sequence.text)
        return openai_replies.choice(
            sequence.index, {"text": text}, choice.finish, choice.stop,
            logprobs=self._all_logprobs(sequence),
            token_ids=choice.tokens if options.token_ids else None,
            prompt_logprobs=_prompt_logprobs(sequence),
            prompt_token_ids=sequence.prompt if options.token_ids else None,
        )  # fmt: skip

    def _chat_choice(self, sequence: ReplySequence) -> Json:
        choice, parsed = sequence.choice, sequence.message
        text = "".join(sequence.text if parsed is None else parsed.content)
        calls = None if parsed is None else parsed.calls
        thoughts = "" if parsed is None else "".join(parsed.thoughts)
        return openai_replies.choice(
            sequence.index, {"message": openai_replies.message(text, calls, thoughts)},
            sequence.finish, choice.stop, logprobs=self._all_logprobs(sequence),
            token_ids=choice.tokens if self.options.token_ids else None,
        )  # fmt: skip

    def _all_logprobs(self, sequence: ReplySequence) -> Json | None:
        return self._logprobs(sequence, sequence.logprobs) if self.options.logprobs else None


def _prompt_logprobs(sequence: ReplySequence) -> list[dict[str, Any] | None] | None:
    logprobs = sequence.prompt_logprobs
    return None if logprobs is None else openai_replies.prompt_logprobs(logprobs)


def end_reply(tracer: Tracer, trace: RequestTrace, reply: Reply | None, error: str) -> None:
    """End a request's trace; `reply` is None if it was rejected, `error` the reason of failure."""
    attributes = NO_ATTRIBUTES
    if reply is not None:
        for sequence in reply.sequences[:1]:
            add_phases(trace, sequence)
        for sequence in reply.sequences[1:]:
            branch = trace.branch()
            branch.start_ns = branch.mark_ns = sequence.arrival
            add_phases(branch, sequence)
            trace.end_branch(branch, "choice", (_CHOICE, (sequence.index,)))
        attributes = _reply_attributes(reply)
    trace.phase("deliver" if trace.collected else "receive")
    tracer.end(trace, ROOT, attributes, error)


def add_phases(trace: RequestTrace, sequence: ReplySequence) -> None:
    """Add a sequence's phases so far: queue, transfer, prefill, decode."""
    begun_ns, loading_ns = sequence.begun, sequence.loading
    if loading_ns or begun_ns:
        trace.phase("queue", end_ns=loading_ns or begun_ns)
    if loading_ns and begun_ns:
        trace.phase("transfer", (_TRANSFER, (sequence.loaded,)), end_ns=begun_ns)
    if not (begun_ns and sequence.first):
        return
    for start_ns, end_ns, tokens in sequence.chunks:
        trace.event("prefill step", start_ns, (_STEP, (tokens, (end_ns - start_ns) / SECOND)))
    prompt = len(sequence.prompt)
    counts = (prompt, prompt - sequence.cached, len(sequence.chunks))
    trace.phase("prefill", (_PREFILL, counts), end_ns=sequence.first)
    if sequence.last > sequence.first:
        gaps = max(1, len(sequence.choice.tokens) - 1)
        itl_s = (sequence.last - sequence.first) / gaps / SECOND
        values = (sequence.choice.count, itl_s, sequence.preemptions)
        trace.phase("decode", (_DECODE, values), end_ns=sequence.last)


def _reply_attributes(reply: Reply) -> Attributes:
    finishes = tuple(sequence.finish for sequence in reply.sequences if sequence.finish)
    operation = "chat" if reply.options.chat else "text_completion"
    return _REPLY, (
        operation, "pigou", reply.model, reply.id, finishes, *reply.token_counts()
    )  # fmt: skip


class ReplyTrace:
    """Context manager for the trace of a request and its reply; no-op without a tracer."""

    __slots__ = ("_reply", "_tracer", "trace")

    def __init__(self, tracer: Tracer | None, headers: Headers) -> None:
        self._tracer = tracer
        self.trace = None if tracer is None else tracer.begin(headers)
        self._reply: Reply | None = None

    @property
    def trace_id(self) -> str:
        """Trace id; empty without one."""
        return "" if self.trace is None else self.trace.context.trace_id

    def phase(self, name: str) -> None:
        """End a request phase."""
        if self.trace is not None:
            self.trace.phase(name)

    def take(self, reply: Reply) -> None:
        """Attach the reply once it has begun."""
        self._reply = reply

    def __enter__(self) -> ReplyTrace:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._tracer is None or self.trace is None:
            return
        failure = error or (None if self._reply is None else self._reply.error)
        status = getattr(failure, "status", 500 if isinstance(failure, Exception) else 0)
        left = isinstance(failure, ConnectionError)
        self.trace.is_failed = status >= 500 and not left
        why = str(status) if self.trace.is_failed else ""
        end_reply(self._tracer, self.trace, self._reply, why)
