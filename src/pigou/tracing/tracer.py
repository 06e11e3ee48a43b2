"""The tracer: begins request traces, and decides at their end which are sent."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice

from pigou.request import SECOND
from pigou.tracing.config import TracingConfig, export_target, resource, sampled_share
from pigou.tracing.exporter import SpanExporter, check_not_grpc
from pigou.tracing.request_trace import NO_ATTRIBUTES, LazyAttributes, RequestTrace
from pigou.tracing.trace_context import (
    Headers,
    TraceContext,
    is_in_ratio,
    new_trace_id,
    read_context,
)

#: Most requests kept per trace.
_MAX_REQUESTS = 64


class TraceMemory:
    """The last traces by id; an agent's trace may have several requests."""

    def __init__(self, max_traces: int) -> None:
        self._max_traces = max_traces
        self._traces: OrderedDict[str, list[RequestTrace]] = OrderedDict()

    def add(self, trace: RequestTrace) -> None:
        """Add an ended request; evict the oldest trace if full."""
        if not self._max_traces:
            return
        requests = self._traces.setdefault(trace.context.trace_id, [])
        self._traces.move_to_end(trace.context.trace_id)
        requests.append(trace)
        del requests[:-_MAX_REQUESTS]
        if len(self._traces) > self._max_traces:
            self._traces.popitem(last=False)

    def find(self, id: str) -> list[RequestTrace]:
        """Return a trace's requests, by its id or a request's; empty if unknown."""
        if id in self._traces:
            return list(self._traces[id])
        for requests in reversed(self._traces.values()):
            if any(request.request_id == id for request in requests):
                return list(requests)
        return []

    def latest(self, count: int) -> Iterator[list[RequestTrace]]:
        """Yield the last traces, newest first."""
        return islice(reversed(list(self._traces.values())), count)


class Tracer:
    """Traces one process's requests, sampled by client or ratio; failed and slow ones are kept."""

    def __init__(
        self, service: str, share: float, slow_s: float, max_traces: int,
        exporter: SpanExporter | None,
    ) -> None:  # fmt: skip
        self.service = service
        self._share = share
        self._slow_ns = round(slow_s * SECOND)
        self.memory = TraceMemory(max_traces)
        self.exporter = exporter
        if exporter is not None:
            exporter.start()

    def begin(self, headers: Headers) -> RequestTrace:
        """Begin the trace of a new request."""
        context = read_context(headers)
        if context is None:
            trace_id = new_trace_id()
            is_sampled = self._share >= 1 or is_in_ratio(trace_id, self._share)
            context = TraceContext(trace_id, 0, is_sampled)
        now_ns = time.monotonic_ns()
        return RequestTrace(context, now_ns, time.time_ns() - now_ns)

    def end(
        self,
        trace: RequestTrace,
        name: str,
        attributes: LazyAttributes = NO_ATTRIBUTES,
        error: str = "",
    ) -> None:
        """End a trace at the end of its last phase; send and keep it."""
        root = trace.end(name, attributes, error)
        if not (trace.context.is_sampled or self._is_notable(trace, root.end_ns - root.start_ns)):
            return
        if self.exporter is not None:
            self.exporter.put(trace)
        self.memory.add(trace)

    def _is_notable(self, trace: RequestTrace, duration_ns: int) -> bool:
        return bool(self._slow_ns) and (trace.is_failed or duration_ns >= self._slow_ns)

    def close(self) -> None:
        """Flush the exporter; takes up to some seconds."""
        if self.exporter is not None:
            self.exporter.close()


def open_tracer(config: TracingConfig, service: str) -> Tracer | None:
    """Return a tracer by options and environment, or None; raises ConfigError."""
    target = export_target(config)
    if target is None:
        return None
    if target.url:
        check_not_grpc(target)
    attributes = resource(service)
    exporter = SpanExporter(target, attributes) if target.url else None
    name = str(attributes["service.name"])
    return Tracer(name, sampled_share(config), config.slow, config.memory, exporter)
