"""A trace for people: spans in waterfall order, as JSON builtins or text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from pigou.request import SECOND
from pigou.tracing.request_trace import RequestTrace, Span, attributes_of

_KINDS = {1: "internal", 2: "server", 3: "client"}
_WIDTH = 40
#: Attributes shown in text, at most four per span.
_SHOWN = ("pigou.worker", "pigou.tokens", "pigou.prompt_tokens", "pigou.computed_tokens",
          "pigou.steps", "pigou.itl_s", "pigou.preemptions")  # fmt: skip
_SHOWN_BELOW = (
    "pigou.kv.",
    "pigou.route.policy",
    "pigou.route.prefill",
    "pigou.route.decode",
    "pigou.route.price_s",
)


def spans_view(traces: Iterable[RequestTrace], service: str) -> list[dict[str, Any]]:
    """Return spans as JSON builtins; times are Unix seconds and durations."""
    return [_span_view(span, trace, service) for trace in traces for span in trace.spans]


def _span_view(span: Span, trace: RequestTrace, service: str) -> dict[str, Any]:
    def unix_s(ns: int) -> float:
        return (ns + trace.epoch_ns) / SECOND

    return {
        "name": span.name,
        "service": service,
        "kind": _KINDS[span.kind],
        "span_id": f"{span.id:016x}",
        "parent_id": f"{span.parent_id:016x}" if span.parent_id else None,
        "start": unix_s(span.start_ns),
        "duration_s": (span.end_ns - span.start_ns) / SECOND,
        "attributes": dict(zip(*attributes_of(span), strict=True)),
        "events": [
            {"name": name, "at": unix_s(at_ns), "attributes": dict(zip(*attributes, strict=True))}
            for name, at_ns, attributes in span.events
        ],
        "error": span.error or None,
    }


def waterfall(spans: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return spans of `spans_view` in waterfall order with `depth`; orphans are at the top."""
    known = {span["span_id"] for span in spans}
    below: dict[str | None, list[dict[str, Any]]] = defaultdict(list)
    for span in spans:
        below[span["parent_id"] if span["parent_id"] in known else None].append(span)
    ordered: list[dict[str, Any]] = []

    def add(parent: str | None, depth: int) -> None:
        for span in sorted(below.pop(parent, ()), key=lambda span: span["start"]):
            ordered.append(span | {"depth": depth})
            add(span["span_id"], depth + 1)

    add(None, 0)
    return ordered


def as_text(spans: Sequence[dict[str, Any]]) -> str:
    """Return a waterfall as text: name, milliseconds, bar, attributes."""
    if not spans:
        return ""
    begin = min(span["start"] for span in spans)
    whole = max(span["start"] + span["duration_s"] for span in spans) - begin or 1.0
    names = [f"{'  ' * span['depth']}{span['name']}" for span in spans]
    width, lines = max(map(len, names)), []
    for name, span in zip(names, spans, strict=True):
        first = round((span["start"] - begin) / whole * _WIDTH)
        length = max(1, round(span["duration_s"] / whole * _WIDTH))
        first = min(first, _WIDTH - length) if length < _WIDTH else 0
        bar = ("." * first + "#" * length)[:_WIDTH].ljust(_WIDTH, ".")
        own = [(key, value) for key, value in span["attributes"].items() if value != "" and
               (key in _SHOWN or key.startswith(_SHOWN_BELOW))]  # fmt: skip
        shown = " ".join(f"{key.rpartition('.')[2]}={_short(value)}" for key, value in own[:4])
        error = f" ERROR {span['error']}" if span["error"] else ""
        lines.append(
            f"{name:{width}} {span['duration_s'] * 1e3:10.3f} ms {bar} {shown}{error}".rstrip()
        )
    return "\n".join(lines) + "\n"


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
