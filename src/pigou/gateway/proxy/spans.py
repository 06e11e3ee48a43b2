"""Spans of a request: its phases, with attributes of OpenTelemetry's GenAI conventions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import TypeVar

import msgspec
from aiohttp import web

from pigou.control.messages import Shed
from pigou.control.router import Explanation
from pigou.gateway.failure import WorkerFailed
from pigou.gateway.request import GatewayRun
from pigou.lifecycle.messages import FetchKV, LifecycleEvent, StartDecode, StartPrefill, Step
from pigou.lifecycle.messages import SubmitRequest as Submit
from pigou.tracing.request_trace import Attributes, AttributeValue, RequestTrace
from pigou.tracing.trace_context import Headers
from pigou.tracing.tracer import Tracer
from pigou.wire.errors import APIError

_T = TypeVar("_T")

#: Status of a request whose client left.
_CLIENT_LEFT = 499
#: Fields of a body that become attributes of the request's span, by the names of both.
_REQUESTED = {
    field: f"gen_ai.request.{attribute}"
    for field, attribute in {
        "max_tokens": "max_tokens", "max_completion_tokens": "max_tokens",
        "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "seed": "seed",
        "n": "choice.count", "presence_penalty": "presence_penalty",
        "frequency_penalty": "frequency_penalty", "stop": "stop_sequences",
    }.items()
}  # fmt: skip
_MAX_VALUE_CHARS = 256
_LEG = ("pigou.worker", "pigou.leg")
_ROUTE = ("policy", "regime", "prefill", "decode", "candidates", "prompt_tokens", "cached_tokens",
          "cost", "price_s", "regret_s", "toll_s")  # fmt: skip
_ROUTE_NAMES = tuple(f"pigou.route.{name}" for name in _ROUTE)
_SERVED = ("gen_ai.operation.name", "gen_ai.provider.name", "http.response.status_code",
           "server.address", "server.port")  # fmt: skip
_REPLIED = ("gen_ai.request.model", "gen_ai.response.model", "gen_ai.request.stream",
            "gen_ai.response.id", "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens",
            "pigou.decision.id")  # fmt: skip


async def within_step(
    run: GatewayRun, step: Step, doing: Awaitable[LifecycleEvent]
) -> LifecycleEvent:
    """Run a lifecycle step within its span; waits and decisions are spans of `decided`."""
    trace = run.trace
    assert trace is not None
    if isinstance(step, Submit):
        try:
            event = await doing
        except BaseException as error:
            trace.phase("queue", error=error_type(error))
            raise
        if isinstance(event, Shed):
            trace.phase("queue", error=event.reason)
        return event
    name, worker = "complete", ""
    if isinstance(step, FetchKV):
        name, worker = "fetch", step.read.worker
    elif isinstance(step, StartPrefill | StartDecode):
        name = "prefill" if isinstance(step, StartPrefill) else "decode"
        worker = step.worker
    return await within_leg(run, name, worker, doing, step.leg)


async def within_leg(
    run: GatewayRun, name: str, worker: str, doing: Awaitable[_T], leg: int = 0
) -> _T:
    """Ask a server within a span that is propagated to it; return the answer."""
    trace = run.trace
    assert trace is not None
    trace.begin_leg()
    trace.workers.add(worker)
    error = ""
    try:
        return await doing
    except BaseException as raised:
        error = error_type(raised)
        raise
    finally:
        span = trace.end_leg(name, (_LEG, (worker, leg)), error)
        first_ns = run.stats.first_token
        if name == "decode" and first_ns > span.start_ns:
            trace.child("stream", span, first_ns)


def decided(trace: RequestTrace, why: Explanation | None, exclude: frozenset[str]) -> None:
    """Add spans for the wait for a decision and the decision."""
    if why is None:
        trace.phase("queue")
        trace.phase("route")
    else:
        trace.phase("queue", end_ns=why.at)
        trace.phase("route", partial(route_attributes, why, exclude))


def route_attributes(why: Explanation, exclude: frozenset[str] = frozenset()) -> Attributes:
    """Return a decision's prices and tolls in seconds, and its other inputs."""
    index, choice, table = why.chosen, why.choice, why.prices
    parts = table.rows[:, index].tolist()  # the last is their sum
    tolls = sum(part for name, part in zip(table.names, parts, strict=False)
                if name.startswith("toll_"))  # fmt: skip
    names = _ROUTE_NAMES + _price_names(table.names)
    values: tuple[AttributeValue, ...] = (
        why.policy, why.regime, choice.prefill or "", choice.decode, len(why.candidates),
        why.prompt, int(choice.cached), float(why.costs[index]), parts[-1],
        parts[-1] - float(table.total.min()), float(tolls), *parts[:-1],
    )  # fmt: skip
    if exclude:
        return (*names, "pigou.route.excluded"), (*values, tuple(sorted(exclude)))
    return names, values


@cache
def _price_names(parts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"pigou.route.price.{name}_s" for name in parts)


class TracedRequest:
    """A request with its trace, started before its body is read."""

    __slots__ = ("run", "status", "trace")

    def __init__(self, trace: RequestTrace) -> None:
        self.trace = trace
        self.run: GatewayRun | None = None  # once its body was read
        self.status = 500

    def take(self, run: GatewayRun) -> None:
        """Attach the parsed request."""
        self.run, run.trace = run, self.trace
        if not self.trace.collected:
            self.trace.phase("receive")


@contextmanager
def traced_request(
    tracer: Tracer | None, headers: Headers, path: str, address: tuple[str, int]
) -> Iterator[TracedRequest | None]:
    """Trace a request (context); None without a tracer."""
    if tracer is None:
        yield None
        return
    traced = TracedRequest(tracer.begin(headers))
    try:
        yield traced
    except BaseException as error:
        traced.status = status_of(error)
        raise
    finally:
        _end_request(tracer, traced, path, address)


def _end_request(
    tracer: Tracer, traced: TracedRequest, path: str, address: tuple[str, int]
) -> None:
    trace, run, status = traced.trace, traced.run, traced.status
    trace.phase("deliver" if trace.collected else "receive")
    metered = None if run is None else run.metered
    if metered is not None and metered.error is not None:
        status = metered.error.status
    trace.is_failed = status >= 500
    operation = "chat" if path.endswith("/chat/completions") else "text_completion"
    names: list[str] = [*_SERVED]
    values: list[AttributeValue] = [operation, "pigou", status, *address]
    name, error = operation, ""
    if status >= 400:
        names.append("error.type")
        values.append(str(status))
        error = str(status) if trace.is_failed else ""
    if run is not None:
        model = run.parsed.fields.model or ""
        name = f"{operation} {model}" if model else operation
        _add_request(run, model, names, values)
        trace.request_id, trace.tenant = run.parsed.id, run.parsed.tenant
    tracer.end(trace, name, (tuple(names), tuple(values)), error)


def status_of(error: BaseException) -> int:
    """Return the HTTP status of an exception."""
    if isinstance(error, APIError | web.HTTPException):
        return error.status
    left = isinstance(error, ConnectionError | TimeoutError | asyncio.CancelledError)
    return _CLIENT_LEFT if left else 500


def error_type(error: BaseException) -> str:
    """Return a short reason of a phase's failure."""
    if isinstance(error, WorkerFailed):
        return error.reason
    if isinstance(error, APIError):
        return str(error.status)
    return "cancelled" if isinstance(error, asyncio.CancelledError) else type(error).__name__


def _add_request(
    run: GatewayRun, model: str, names: list[str], values: list[AttributeValue]
) -> None:
    stats, body, parsed = run.stats, run.body, run.parsed
    names += _REPLIED
    values += (
        model, model, parsed.stream, f"{'chatcmpl' if parsed.chat else 'cmpl'}-{parsed.wire_id}",
        stats.prompt_tokens or run.prompt_tokens, stats.completion_tokens, run.parsed.id,
    )  # fmt: skip
    for field in _REQUESTED.keys() & body.keys():
        if (value := _attribute(body[field])) is not None:
            names.append(_REQUESTED[field])
            values.append(value)
    further: list[tuple[str, AttributeValue | None]] = [
        ("gen_ai.response.finish_reasons", stats.finish_reasons or None),
        ("gen_ai.usage.cache_read.input_tokens", run.cached),
        ("pigou.tenant", run.parsed.tenant or None),
        ("pigou.overflow.from", run.overflow or None),
        ("gen_ai.response.time_to_first_chunk", run.ttft_s),
    ]
    for name, value in further:
        if value is not None:
            names.append(name)
            values.append(value)


def _attribute(value: object) -> AttributeValue | None:
    """Return a body field as an attribute; None for null and unsupported types."""
    if isinstance(value, msgspec.Raw):
        if len(memoryview(value)) > _MAX_VALUE_CHARS:
            return None
        value = msgspec.json.decode(value)
    if isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, list) and all(isinstance(entry, str) for entry in value):
        return tuple(value)
    return None
