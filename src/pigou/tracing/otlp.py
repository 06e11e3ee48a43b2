"""OTLP in JSON: what an ExportTraceServiceRequest looks like.

Source: opentelemetry-proto 1.x, "OTLP/HTTP", JSON Protobuf Encoding: ids are hexadecimal, 64-bit
integers are strings, enums are numbers. JSON is cheaper here than Protocol Buffers: the one is
encoded by compiled code, the other would be by Python.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from pigou import __version__
from pigou.tracing.request_trace import AttributeValue, RequestTrace, Span, attributes_of

CONTENT_TYPE = "application/json"
_ERROR = 2  # of a span's status


def frame(resource: Mapping[str, AttributeValue]) -> tuple[bytes, bytes]:
    """Return what stands before and after the spans of a process."""
    spans = {"scope": {"name": "pigou", "version": __version__}, "spans": []}
    shape = {
        "resourceSpans": [
            {"resource": {"attributes": _attributes(resource.items())}, "scopeSpans": [spans]}
        ]
    }
    before, _, after = msgspec.json.encode(shape).rpartition(b"[]")
    return before + b"[", b"]" + after


def encode_spans(trace: RequestTrace) -> bytes:
    """Return the spans of a request, separated by commas."""
    trace_id, epoch_ns = trace.context.trace_id, trace.epoch_ns
    return msgspec.json.encode([_span(span, trace_id, epoch_ns, trace) for span in trace.spans])[
        1:-1
    ]


def rejected_spans(answer: bytes) -> int:
    """Return how many spans a receiver did not take, by its answer of status 200."""
    try:
        partial = msgspec.json.decode(answer, type=dict[str, Any]).get("partialSuccess") or {}
        return int(partial.get("rejectedSpans", 0))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError, TypeError,
            AttributeError):  # fmt: skip
        return 0


def _span(span: Span, trace_id: str, epoch_ns: int, trace: RequestTrace) -> dict[str, Any]:
    name, kind, id, parent_id, start_ns, end_ns, _, events, error = span
    made: dict[str, Any] = {
        "traceId": trace_id,
        "spanId": f"{id:016x}",
        "name": name,
        "kind": kind,
        "startTimeUnixNano": str(start_ns + epoch_ns),
        "endTimeUnixNano": str(end_ns + epoch_ns),
    }
    if parent_id:
        made["parentSpanId"] = f"{parent_id:016x}"
    if attributes := attributes_of(span):
        made["attributes"] = _attributes(attributes)
    if events:
        made["events"] = [
            {"name": event, "timeUnixNano": str(at_ns + epoch_ns), "attributes": _attributes(pairs)}
            for event, at_ns, pairs in events
        ]
    if error:
        made["status"] = {"code": _ERROR, "message": error}
    if id == trace.span_id and trace.context.state:
        made["traceState"] = trace.context.state
    return made


def _attributes(pairs: Iterable[tuple[str, AttributeValue]]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in pairs]


def _value(value: AttributeValue) -> dict[str, Any]:
    kind = type(value)
    if kind is str:
        return {"stringValue": value}
    if kind is int:
        return {"intValue": str(value)}
    if kind is bool:
        return {"boolValue": value}
    if isinstance(value, tuple):
        return {"arrayValue": {"values": [_value(entry) for entry in value]}}
    number = float(value)
    return {"doubleValue": number if math.isfinite(number) else str(number)}
