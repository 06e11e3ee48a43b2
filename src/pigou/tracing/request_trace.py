"""The trace of one request within one process, as it comes: spans, the open one, and the root."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from pigou.tracing.trace_context import TraceContext, new_span_id

#: Kinds of spans, by their numbers in OTLP.
INTERNAL, SERVER, CLIENT = 1, 2, 3
AttributeValue: TypeAlias = str | bool | int | float | tuple[str, ...]
#: Names of attributes, and their values in the same order.
Attributes: TypeAlias = tuple[tuple[str, ...], tuple[AttributeValue, ...]]
NO_ATTRIBUTES: Attributes = ((), ())
#: Attributes, or what makes them once they are read: then a request that is not sent needs none.
LazyAttributes: TypeAlias = Attributes | Callable[[], Attributes]
#: Something at one moment of a span: name, monotonic nanoseconds, attributes.
SpanEvent: TypeAlias = tuple[str, int, Attributes]
#: Events of one request at most.
MAX_EVENTS = 128


#: What a span is while it is collected, in the order of the fields of `Span`.
SpanTuple: TypeAlias = tuple[
    str, int, int, int, int, int, LazyAttributes, tuple[SpanEvent, ...], str
]


class Span(NamedTuple):
    """A span that has ended; times are in monotonic nanoseconds of its process."""

    name: str
    kind: int
    id: int
    parent_id: int
    start_ns: int
    end_ns: int
    attributes: LazyAttributes = NO_ATTRIBUTES
    events: tuple[SpanEvent, ...] = ()
    error: str = ""


class RequestTrace:
    """Spans of one request in this process.

    Phases follow one another without a gap: each begins where the last one ended. So they add up
    to the root.
    """

    __slots__ = (
        "_events", "collected", "context", "epoch_ns", "is_failed", "leg_id", "mark_ns", "outgoing",
        "request_id", "span_id", "start_ns", "tenant", "workers",
    )  # fmt: skip

    def __init__(self, context: TraceContext, start_ns: int, epoch_ns: int) -> None:
        self.context = context
        self.span_id = new_span_id()
        self.start_ns = self.mark_ns = start_ns
        self.epoch_ns = epoch_ns  # nanoseconds since 1970 at time 0 of that clock
        self.collected: list[SpanTuple] = []
        self.outgoing = ""  # header lines for the server that is asked now; empty between legs
        self.is_failed = False
        self.request_id = self.tenant = ""
        self.workers: set[str] = set()
        self._events: list[SpanEvent] = []
        # Span of the server that was asked last, or of the phase of the sequences;
        # 0 before
        self.leg_id = 0

    @property
    def spans(self) -> list[Span]:
        """The spans that have ended."""
        return [Span(*span) for span in self.collected]

    def phase(
        self,
        name: str,
        attributes: LazyAttributes = NO_ATTRIBUTES,
        *,
        end_ns: int = 0,
        error: str = "",
    ) -> None:
        """End a phase, now or at `end_ns` (monotonic); `error` says why it failed."""
        start_ns = self.mark_ns
        self.mark_ns = end_ns = max(end_ns or time.monotonic_ns(), start_ns)
        events = self._take_events() if self._events else ()
        self.collected.append(
            (
                name,
                INTERNAL,
                new_span_id(),
                self.span_id,
                start_ns,
                end_ns,
                attributes,
                events,
                error,
            )
        )

    def begin_leg(self) -> None:
        """Begin a phase in which a server is asked; until its end `outgoing` has its headers."""
        self.leg_id = new_span_id()
        self.outgoing = self.context.headers(self.leg_id)

    def end_leg(
        self, name: str, attributes: LazyAttributes = NO_ATTRIBUTES, error: str = ""
    ) -> Span:
        """End the phase of the server that was asked; return its span."""
        start_ns, self.mark_ns, self.outgoing = self.mark_ns, time.monotonic_ns(), ""
        span = Span(name, CLIENT, self.leg_id, self.span_id, start_ns, self.mark_ns, attributes,
                    self._take_events(), error)  # fmt: skip
        self.collected.append(span)
        return span

    def child(
        self, name: str, above: Span, start_ns: int, attributes: LazyAttributes = NO_ATTRIBUTES
    ) -> None:
        """Add a part of a phase that ends with it."""
        self.collected.append(
            Span(name, INTERNAL, new_span_id(), above.id, start_ns, above.end_ns, attributes)
        )

    def event(self, name: str, at_ns: int, attributes: Attributes = NO_ATTRIBUTES) -> None:
        """Note an event of the open phase; those beyond `MAX_EVENTS` are not."""
        if len(self._events) < MAX_EVENTS:
            self._events.append((name, at_ns, attributes))

    def end(self, name: str, attributes: LazyAttributes = NO_ATTRIBUTES, error: str = "") -> Span:
        """End the request, at the end of its last phase; return the root."""
        root = Span(name, SERVER, self.span_id, self.context.parent_id, self.start_ns,
                    self.mark_ns, attributes, self._take_events(), error)  # fmt: skip
        self.collected.append(root)
        return root

    def begin_branches(self) -> None:
        """Begin a phase that the traces of several sequences are part of."""
        self.leg_id = new_span_id()

    def end_branches(self, name: str) -> None:
        """End the phase of the sequences."""
        start_ns, self.mark_ns = self.mark_ns, time.monotonic_ns()
        span = Span(name, INTERNAL, self.leg_id, self.span_id, start_ns, self.mark_ns)
        self.collected.append(span)

    def branch(self) -> RequestTrace:
        """Return the trace of one of several sequences; its spans are this one's, too."""
        branch = RequestTrace(self.context, time.monotonic_ns(), self.epoch_ns)
        branch.collected, branch.workers = self.collected, self.workers
        return branch

    def end_branch(
        self, branch: RequestTrace, name: str, attributes: LazyAttributes = NO_ATTRIBUTES
    ) -> None:
        """End the trace of a sequence."""
        self.collected.append(
            Span(name, INTERNAL, branch.span_id, self.leg_id or self.span_id, branch.start_ns,
                 time.monotonic_ns(), attributes)
        )  # fmt: skip

    def _take_events(self) -> tuple[SpanEvent, ...]:
        if not self._events:
            return ()
        events, self._events = tuple(self._events), []
        return events


def attributes_of(span: Span) -> Attributes:
    """Return the attributes of a span."""
    return span.attributes() if callable(span.attributes) else span.attributes
