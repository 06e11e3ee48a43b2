"""OTLP/HTTP in JSON: hexadecimal ids, 64-bit integers as strings (opentelemetry-proto 1.x).

Templates encode faster than objects.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from json.encoder import encode_basestring_ascii as _string
from operator import itemgetter
from typing import Any, NamedTuple

import msgspec

from pigou import __version__
from pigou.tracing.request_trace import Attributes, AttributeValue, RequestTrace, SpanEvent

CONTENT_TYPE = "application/json"
#: status code of a failed span
_ERROR = 2  # status code of a failed span
_MAX_TEMPLATES = 1024
_KINDS = {str: "stringValue", bool: "boolValue", int: "intValue", float: "doubleValue",
          tuple: "arrayValue"}  # fmt: skip
#: Slot of each value type. Nine digits are nanoseconds of a second.
_SLOTS = {str: "%s", bool: "%s", int: '"%d"', float: "%.9g", tuple: "%s"}


class _Template(NamedTuple):
    """JSON of attributes with slots for values."""

    json: str
    # (index, formatter) of each value inserted as text
    texts: tuple[tuple[int, Callable[[Any], str]], ...]
    # getter of the float values; None without any
    floats: Callable[[tuple[AttributeValue, ...]], Any] | None

    @classmethod
    def of(cls, names: tuple[str, ...], types: tuple[type, ...]) -> _Template:
        texts = tuple((index, _TEXTS[kind]) for index, kind in enumerate(types) if kind in _TEXTS)
        indices = [index for index, kind in enumerate(types) if kind is float]
        # With at least two, the getter returns a tuple.
        floats = itemgetter(*indices, indices[0]) if indices else None
        return cls(",".join(map(_slot, names, types)), texts, floats)


#: By attribute names and value types; spans of one name have few variants.
_templates: dict[tuple[tuple[str, ...], tuple[type, ...]], _Template] = {}


def frame(resource: Mapping[str, AttributeValue]) -> tuple[bytes, bytes]:
    """Return the bytes before and after the spans of a process."""
    attributes = _attributes((tuple(resource), tuple(resource.values())))
    scope = f'{{"name":"pigou","version":{_string(__version__)}}}'
    before = (
        f'{{"resourceSpans":[{{"resource":{{"attributes":[{attributes}]}},'
        f'"scopeSpans":[{{"scope":{scope},"spans":['
    )
    return before.encode(), b"]}]}]}"


def encode_spans(trace: RequestTrace) -> bytes:
    """Return a request's spans, separated by commas."""
    trace_id, epoch_ns, parts = trace.context.trace_id, trace.epoch_ns, []
    for name, kind, id, parent_id, start_ns, end_ns, lazy, events, error in trace.collected:
        more = ""
        attributes = lazy() if callable(lazy) else lazy
        if attributes[0]:
            more = f',"attributes":[{_attributes(attributes)}]'
        if parent_id:
            more += f',"parentSpanId":"{parent_id:016x}"'
        if events:
            more += f',"events":[{",".join(_event(event, epoch_ns) for event in events)}]'
        if error:
            more += f',"status":{{"code":{_ERROR},"message":{_string(error)}}}'
        if id == trace.span_id and trace.context.state:
            more += f',"traceState":{_string(trace.context.state)}'
        parts.append(
            f'{{"traceId":"{trace_id}","spanId":"{id:016x}","name":{_string(name)},"kind":{kind},'
            f'"startTimeUnixNano":"{start_ns + epoch_ns}",'
            f'"endTimeUnixNano":"{end_ns + epoch_ns}"{more}}}'
        )
    return ",".join(parts).encode()


def rejected_spans(answer: bytes) -> int:
    """Return how many spans a status-200 answer rejected."""
    try:
        partial = msgspec.json.decode(answer, type=dict[str, Any]).get("partialSuccess") or {}
        return int(partial.get("rejectedSpans", 0))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError, TypeError,
            AttributeError):  # fmt: skip
        return 0


def _event(event: SpanEvent, epoch_ns: int) -> str:
    name, at_ns, attributes = event
    return (
        f'{{"name":{_string(name)},"timeUnixNano":"{at_ns + epoch_ns}",'
        f'"attributes":[{_attributes(attributes)}]}}'
    )


def _attributes(attributes: Attributes) -> str:
    names, values = attributes
    types = tuple(map(type, values))
    template = _templates.get((names, types))
    if template is None:
        if len(_templates) >= _MAX_TEMPLATES:
            _templates.clear()
        template = _templates[names, types] = _Template.of(names, types)
    json, texts, floats = template
    if floats is not None and not math.isfinite(sum(floats(values))):
        values = tuple(value if _is_json(value) else str(value) for value in values)
        if types != tuple(map(type, values)):
            return _attributes((names, values))
    filled = list(values)
    for index, text in texts:
        filled[index] = text(filled[index])
    return json % tuple(filled)


def _slot(name: str, kind: type) -> str:
    key = _string(name).replace("%", "%%")
    return f'{{"key":{key},"value":{{"{_KINDS[kind]}":{_SLOTS[kind]}}}}}'


def _is_json(value: AttributeValue) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def _array(values: tuple[str, ...]) -> str:
    entries = (f'{{"stringValue":{_string(value)}}}' for value in values)
    return f'{{"values":[{",".join(entries)}]}}'


#: Formatter of each type that is inserted as text.
_TEXTS: dict[type, Callable[[Any], str]] = {
    str: _string, bool: {False: "false", True: "true"}.__getitem__, tuple: _array,
}  # fmt: skip
