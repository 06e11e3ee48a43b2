"""Spans of a request in the worker: its phases by the times that the engine reports."""

from __future__ import annotations

from pigou.request import SECOND
from pigou.tracing.request_trace import NO_ATTRIBUTES, Attributes, RequestTrace
from pigou.tracing.tracer import Tracer
from pigou.worker.reply import Reply, ReplySequence

#: Name of the root, as vLLM's is called.
ROOT = "llm_request"
_CHOICE, _TRANSFER = ("pigou.choice",), ("pigou.kv.tokens",)
_STEP = ("pigou.tokens", "pigou.duration_s")
_PREFILL = ("pigou.prompt_tokens", "pigou.computed_tokens", "pigou.steps")
_DECODE = ("pigou.tokens", "pigou.itl_s", "pigou.preemptions")
_REPLY = ("gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.response.model",
          "gen_ai.response.id", "gen_ai.response.finish_reasons", "gen_ai.usage.input_tokens",
          "gen_ai.usage.output_tokens", "gen_ai.usage.cache_read.input_tokens")  # fmt: skip


def end_reply(tracer: Tracer, trace: RequestTrace, reply: Reply | None, error: str) -> None:
    """End the trace of a request.

    Args:
        reply: to it; None where it was refused before one began.
        error: why it failed; empty where it did not.
    """
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
    """Add the phases of a sequence that came so far: queue, transfer, prefill, decode."""
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
    options, sequences = reply.options, reply.sequences
    leaders = sequences[:: options.per_prompt]
    return _REPLY, (
        "chat" if options.chat else "text_completion",
        "pigou",
        reply.model,
        reply.id,
        tuple(sequence.finish for sequence in sequences if sequence.finish),
        sum(len(sequence.prompt) for sequence in leaders),
        sum(sequence.choice.count for sequence in sequences),
        sum(min(sequence.cached, len(sequence.prompt)) for sequence in leaders),
    )


class UntracedReply:
    """What stands for the trace of a request where requests are not traced: it does nothing.

    Attributes:
        trace: None.
    """

    __slots__ = ("trace",)

    def __init__(self) -> None:
        self.trace: RequestTrace | None = None

    @property
    def trace_id(self) -> str:
        """Id of the trace; empty without one."""
        return "" if self.trace is None else self.trace.context.trace_id

    def phase(self, name: str) -> None:
        """End a phase of the request."""

    def take(self, reply: Reply) -> None:
        """Take the reply, once it has begun."""

    def __enter__(self) -> UntracedReply:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        pass


#: Of all requests that are not traced.
NOT_TRACED = UntracedReply()


class TracedReply(UntracedReply):
    """The trace of a request and the reply to it; its end is that of the `with` block."""

    __slots__ = ("_reply", "_tracer")

    def __init__(self, tracer: Tracer, trace: RequestTrace) -> None:
        self._tracer = tracer
        self.trace: RequestTrace = trace
        self._reply: Reply | None = None

    def phase(self, name: str) -> None:
        """End a phase of the request."""
        self.trace.phase(name)

    def take(self, reply: Reply) -> None:
        """Take the reply, once it has begun."""
        self._reply = reply

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        failure = error or (None if self._reply is None else self._reply.error)
        status = getattr(failure, "status", 500 if isinstance(failure, Exception) else 0)
        left = isinstance(failure, ConnectionError)
        self.trace.is_failed = status >= 500 and not left
        why = str(status) if self.trace.is_failed else ""
        end_reply(self._tracer, self.trace, self._reply, why)
