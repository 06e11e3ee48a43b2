"""The trace of one request within one process: spans, the open one, and the root."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from pigou.tracing.trace_context import TraceContext, new_span_id

#: Span kinds, numbered as in OTLP.
INTERNAL, SERVER, CLIENT = 1, 2, 3
AttributeValue: TypeAlias = str | bool | int | float | tuple[str, ...]
#: Attribute names, and values in the same order.
Attributes: TypeAlias = tuple[tuple[str, ...], tuple[AttributeValue, ...]]
NO_ATTRIBUTES: Attributes = ((), ())
#: Attributes, or a callable that makes them on export.
LazyAttributes: TypeAlias = Attributes | Callable[[], Attributes]
#: A span event: name, monotonic nanoseconds, attributes.
SpanEvent: TypeAlias = tuple[str, int, Attributes]
#: Most events of one request.
MAX_EVENTS = 128


#: A span while collected: the fields of `Span` in order.
SpanTuple: TypeAlias = tuple[
    str, int, int, int, int, int, LazyAttributes, tuple[SpanEvent, ...], str
]


class Span(NamedTuple):
    """An ended span; times are monotonic nanoseconds of its process."""

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
    """Spans of one request in this process; its phases are contiguous and add up to the root."""

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
        # Span of the last server call, or of the sequences' phase; 0 before
        self.leg_id = 0

    @property
    def spans(self) -> list[Span]:
        """The ended spans."""
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
            (name, INTERNAL, new_span_id(), self.span_id, start_ns, end_ns, attributes, events,
             error)
        )  # fmt: skip

    def begin_leg(self) -> None:
        """Begin a server call; until its end `outgoing` has its headers."""
        self.leg_id = new_span_id()
        self.outgoing = self.context.headers(self.leg_id)

    def end_leg(
        self, name: str, attributes: LazyAttributes = NO_ATTRIBUTES, error: str = ""
    ) -> Span:
        """End the server call's phase; return its span."""
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
        """Add an event to the open phase, up to `MAX_EVENTS`."""
        if len(self._events) < MAX_EVENTS:
            self._events.append((name, at_ns, attributes))

    def end(self, name: str, attributes: LazyAttributes = NO_ATTRIBUTES, error: str = "") -> Span:
        """End the request at the end of its last phase; return the root."""
        root = Span(name, SERVER, self.span_id, self.context.parent_id, self.start_ns,
                    self.mark_ns, attributes, self._take_events(), error)  # fmt: skip
        self.collected.append(root)
        return root

    def begin_branches(self) -> None:
        """Begin the phase that several sequences' traces belong to."""
        self.leg_id = new_span_id()

    def end_branches(self, name: str) -> None:
        """End the sequences' phase."""
        start_ns, self.mark_ns = self.mark_ns, time.monotonic_ns()
        span = Span(name, INTERNAL, self.leg_id, self.span_id, start_ns, self.mark_ns)
        self.collected.append(span)

    def branch(self) -> RequestTrace:
        """Return the trace of one of several sequences; it shares this one's spans."""
        branch = RequestTrace(self.context, time.monotonic_ns(), self.epoch_ns)
        branch.collected, branch.workers = self.collected, self.workers
        return branch

    def end_branch(
        self, branch: RequestTrace, name: str, attributes: LazyAttributes = NO_ATTRIBUTES
    ) -> None:
        """End a sequence's trace."""
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
    """Return a span's attributes."""
    return span.attributes() if callable(span.attributes) else span.attributes
