"""Spans of a request in the gateway: what its phases are called, and what is known of them.

Names of attributes are those of OpenTelemetry's conventions for generative AI where there are
any, else they begin with `pigou.`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from functools import partial
from typing import TypeVar

import msgspec
from aiohttp import web

from pigou.control.decisions import Explanation
from pigou.control.messages import Shed
from pigou.gateway.failure import Rejected, WorkerFailed
from pigou.gateway.gateway_request import GatewayRequest
from pigou.lifecycle.messages import FetchKV, LifecycleEvent, StartDecode, StartPrefill, Step
from pigou.lifecycle.messages import SubmitRequest as Submit
from pigou.request import SECOND
from pigou.tracing.request_trace import Attributes, AttributeValue, RequestTrace
from pigou.tracing.tracer import Tracer
from pigou.wire.errors import APIError

_T = TypeVar("_T")

#: Status of a request whose client left.
_CLIENT_LEFT = 499
#: Fields of a body that become attributes of the request's span, by the names of both.
_REQUESTED = {
    "max_tokens": "max_tokens", "max_completion_tokens": "max_tokens", "temperature": "temperature",
    "top_p": "top_p", "top_k": "top_k", "seed": "seed", "n": "choice.count",
    "presence_penalty": "presence_penalty", "frequency_penalty": "frequency_penalty",
    "stop": "stop_sequences",
}  # fmt: skip
_MAX_VALUE_CHARS = 256


async def within_step(
    call: GatewayRequest, step: Step, doing: Awaitable[LifecycleEvent]
) -> LifecycleEvent:
    """Do a step of a request's life within its span; return its event.

    The wait for a decision and the decision itself are spans of `decided`.
    """
    trace = call.trace
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
    return await within_leg(call, name, worker, doing, step.leg)


async def within_leg(
    call: GatewayRequest, name: str, worker: str, doing: Awaitable[_T], leg: int = 0
) -> _T:
    """Ask a server within a span, whose context it is sent; return what it answers."""
    trace = call.trace
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
        span = trace.end_leg(name, (("pigou.worker", worker), ("pigou.leg", leg)), error)
        first_ns = call.stats.first_token
        if name == "decode" and first_ns > span.start_ns:
            trace.child("stream", span, first_ns)


def decided(trace: RequestTrace, why: Explanation | None, exclude: frozenset[str]) -> None:
    """Note a decision: the wait until it was made, and what it was made by."""
    trace.phase("queue", end_ns=0 if why is None else why.at)
    trace.phase("route", () if why is None else partial(route_attributes, why, exclude))


def route_attributes(why: Explanation, exclude: frozenset[str] = frozenset()) -> Attributes:
    """Return the prices and tolls of a decision, in seconds, and what else led to it."""
    index, choice, price = why.chosen, why.choice, why.price
    parts = why.prices
    pairs: list[tuple[str, AttributeValue]] = [
        ("pigou.route.policy", why.policy),
        ("pigou.route.regime", why.regime),
        ("pigou.route.prefill", choice.prefill or ""),
        ("pigou.route.decode", choice.decode),
        ("pigou.route.candidates", len(why.candidates)),
        ("pigou.route.prompt_tokens", why.prompt),
        ("pigou.route.cached_tokens", int(choice.cached)),
        ("pigou.route.cost", float(why.costs[index])),
        ("pigou.route.price_s", float(price[index])),
        ("pigou.route.regret_s", float(price[index] - price.min())),
        ("pigou.route.toll_s", float(sum(parts[name][index] for name in parts
                                          if name.startswith("toll_")))),
        *((f"pigou.route.price.{name}_s", float(parts[name][index])) for name in parts),
    ]  # fmt: skip
    if exclude:
        pairs.append(("pigou.route.excluded", tuple(sorted(exclude))))
    return tuple(pairs)


class TracedRequest:
    """A request with its trace, from before its body is read.

    Attributes:
        trace: of the request.
        call: the request; None before it was read.
    """

    __slots__ = ("call", "trace")

    def __init__(self, trace: RequestTrace) -> None:
        self.trace = trace
        self.call: GatewayRequest | None = None

    def take(self, call: GatewayRequest) -> None:
        """Take the request, once its body was read."""
        self.call, call.trace = call, self.trace
        if not self.trace.spans:
            self.trace.phase("receive")


def end_request(
    tracer: Tracer, traced: TracedRequest, path: str, status: int, address: tuple[str, int]
) -> None:
    """End the trace of a request.

    Args:
        tracer: that began it.
        traced: the request.
        path: of its route.
        status: of the reply.
        address: host and port of this gateway.
    """
    trace, call = traced.trace, traced.call
    trace.phase("deliver" if trace.spans else "receive")
    metered = None if call is None else call.metered
    if metered is not None and metered.error is not None:
        status = metered.error.status
    trace.is_failed = status >= 500
    operation = "chat" if path.endswith("/chat/completions") else "text_completion"
    pairs: list[tuple[str, AttributeValue]] = [
        ("gen_ai.operation.name", operation),
        ("gen_ai.provider.name", "pigou"),
        ("http.response.status_code", status),
        ("server.address", address[0]),
        ("server.port", address[1]),
    ]
    name, error = operation, ""
    if status >= 400:
        pairs.append(("error.type", str(status)))
        error = str(status) if trace.is_failed else ""
    if call is not None:
        model = call.fields.model or ""
        name = f"{operation} {model}" if model else operation
        pairs += _request_attributes(call, model)
        trace.request_id, trace.tenant = call.id, call.tenant
    tracer.end(trace, name, tuple(pairs), error)


def status_of(error: BaseException) -> int:
    """Return the status that an exception becomes, or stands for."""
    if isinstance(error, APIError | Rejected):
        return error.status
    if isinstance(error, web.HTTPException):
        return error.status
    left = isinstance(error, ConnectionError | TimeoutError | asyncio.CancelledError)
    return _CLIENT_LEFT if left else 500


def error_type(error: BaseException) -> str:
    """Return why a phase failed, in a word."""
    if isinstance(error, WorkerFailed):
        return error.reason
    if isinstance(error, APIError | Rejected):
        return str(error.status)
    return "cancelled" if isinstance(error, asyncio.CancelledError) else type(error).__name__


def _request_attributes(call: GatewayRequest, model: str) -> list[tuple[str, AttributeValue]]:
    stats, body = call.stats, call.body
    pairs: list[tuple[str, AttributeValue]] = [
        ("gen_ai.request.model", model),
        ("gen_ai.response.model", model),
        ("gen_ai.request.stream", call.stream),
        ("gen_ai.response.id", f"{'chatcmpl' if call.chat else 'cmpl'}-{call.wire_id}"),
        ("gen_ai.usage.input_tokens", stats.prompt_tokens or call.prompt),
        ("gen_ai.usage.output_tokens", stats.completion_tokens),
        ("pigou.decision.id", call.id),
    ]
    for name, attribute in _REQUESTED.items():
        if name in body and (value := _attribute(body[name])) is not None:
            pairs.append((f"gen_ai.request.{attribute}", value))
    if stats.finish_reasons:
        pairs.append(("gen_ai.response.finish_reasons", stats.finish_reasons))
    if stats.first_token:
        first_s = (stats.first_token - call.arrival) / SECOND
        pairs.append(("gen_ai.response.time_to_first_chunk", first_s))
    if call.cached is not None:
        pairs.append(("gen_ai.usage.cache_read.input_tokens", call.cached))
    if call.tenant:
        pairs.append(("pigou.tenant", call.tenant))
    if call.overflow:
        pairs.append(("pigou.overflow.from", call.overflow))
    return pairs


def _attribute(value: object) -> AttributeValue | None:
    """Return a field of a body as an attribute; None for null, and for what is no attribute."""
    if isinstance(value, msgspec.Raw):
        if len(memoryview(value)) > _MAX_VALUE_CHARS:
            return None
        value = msgspec.json.decode(value)
    if isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, list) and all(isinstance(entry, str) for entry in value):
        return tuple(value)
    return None
