"""Trace pages: the gateway's spans joined with its workers'."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from aiohttp import web

from pigou.gateway.api.page import APIPage, APIPages, json_response, number_parameter
from pigou.gateway.auth.keys import current_key
from pigou.gateway.gateway import Gateway
from pigou.gateway.model_routing import ModelRouting
from pigou.gateway.proxy.upstream import Upstream
from pigou.request import SECOND
from pigou.tracing.request_trace import RequestTrace
from pigou.tracing.waterfall import as_text, spans_view, waterfall
from pigou.wire.errors import APIError, bad_request

_ASK_S = 2.0
_DEFAULT_LIMIT, _MAX_LIMIT = 20, 1000


class _WorkerTrace(msgspec.Struct):
    """A worker's spans of a trace."""

    spans: list[dict[str, Any]]


def pages(gateway: Gateway) -> APIPages:
    """Return `/traces` and `/traces/ID`, for requests visible to the key."""
    tracer = gateway.tracer

    async def latest(request: web.Request) -> web.Response:
        """List the latest traced requests, newest first."""
        limit = number_parameter(request, "limit", _DEFAULT_LIMIT, _MAX_LIMIT)
        if tracer is None:
            return json_response({"tracing": False, "traces": []})
        rows = [
            _row(trace)
            for traces in tracer.memory.latest(limit)
            for trace in _own(reversed(traces))
        ]
        return json_response({"tracing": True, "traces": rows[:limit]})

    async def one(request: web.Request) -> web.Response:
        """Show a trace by its id or a decision's, as JSON or text (`format=text`)."""
        id, form = request.match_info["id"], request.query.get("format", "json")
        if form not in ("json", "text"):
            raise bad_request(f"format is {form[:40]!r}; it must be json or text.", "format")
        if tracer is None:
            raise APIError(
                404,
                "This gateway traces nothing: start it with --otlp-traces-endpoint URL, or "
                "--otlp-traces-endpoint memory.",
                "id",
            )
        traces = list(_own(tracer.memory.find(id)))
        if not traces:
            raise APIError(
                404,
                f"The trace {id[:64]!r} is not known: GET /traces lists those that are "
                "remembered (--trace-memory).",
                "id",
            )
        spans = spans_view(traces, tracer.service)
        spans += _below(spans, await _worker_spans(gateway.routing, traces))
        ordered = waterfall(spans)
        if form == "text":
            return web.Response(text=as_text(ordered))
        return json_response({"trace_id": traces[0].context.trace_id, "spans": ordered})

    return APIPages([
        APIPage("/traces", latest, parameters=("limit",)),
        APIPage("/traces/{id}", one, parameters=("format",)),
    ])  # fmt: skip


async def _worker_spans(
    models: ModelRouting, traces: Sequence[RequestTrace]
) -> list[dict[str, Any]]:
    """Return the workers' spans of a trace; silent workers are skipped."""
    names = set[str]().union(*(trace.workers for trace in traces))
    path = f"/traces/{traces[0].context.trace_id}"
    answers = [
        _ask(upstream, path)
        for model in models
        for name, upstream in model.plane_driver.upstreams.items()
        if name in names and not upstream.engine.stock
    ]
    return [span for spans in await asyncio.gather(*answers) for span in spans]


def _own(traces: Iterable[RequestTrace]) -> Iterable[RequestTrace]:
    key = current_key()
    return (trace for trace in traces if key.admin or trace.tenant == key.tenant)


def _row(trace: RequestTrace) -> dict[str, Any]:
    root = trace.spans[-1]
    return {
        "trace_id": trace.context.trace_id,
        "id": trace.request_id or None,
        "name": root.name,
        "start": (root.start_ns + trace.epoch_ns) / SECOND,
        "duration_s": (root.end_ns - root.start_ns) / SECOND,
        "error": root.error or None,
        "tenant": trace.tenant,
        "spans": len(trace.spans),
    }


async def _ask(upstream: Upstream, path: str) -> list[dict[str, Any]]:
    page = await upstream.page(path, _ASK_S)
    try:
        return [] if page is None else msgspec.json.decode(page, type=_WorkerTrace).spans
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return []


def _below(spans: list[dict[str, Any]], others: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the workers' spans below these: a trace may include other tenants'."""
    known, chosen, fresh = {span["span_id"] for span in spans}, list[dict[str, Any]](), spans
    while fresh:
        fresh = [span for span in others if span["parent_id"] in known]
        others = [span for span in others if span["parent_id"] not in known]
        known.update(span["span_id"] for span in fresh)
        chosen += fresh
    return chosen
