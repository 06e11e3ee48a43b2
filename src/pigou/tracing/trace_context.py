"""W3C Trace Context headers (https://www.w3.org/TR/trace-context/, 23 November 2021)."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
_VALUE = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_NO_TRACE, _NO_SPAN = "0" * 32, "0" * 16
_MEMBER = re.compile(
    r"[a-z0-9][a-z0-9_\-*/]{0,255}(@[a-z][a-z0-9_\-*/]{0,13})?"
    r"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
)
_MAX_MEMBERS, _MAX_STATE_CHARS = 32, 8192


class Headers(Protocol):
    """Request headers with repeatable names."""

    def getall(self, key: str, default: Sequence[str], /) -> Sequence[str]:
        """Return all values of a header."""
        ...


class TraceContext(NamedTuple):
    """Trace and parent of a span."""

    trace_id: str  # 32 hexadecimal digits
    parent_id: int  # parent span, 64 bits; 0 for none
    is_sampled: bool  # whether the caller records the trace
    state: str = ""  # `tracestate` as received; empty for none

    def header(self, span_id: int) -> str:
        """Return the `traceparent` of a call within a span."""
        return f"00-{self.trace_id}-{span_id:016x}-0{self.is_sampled:d}"

    def header_map(self, span_id: int) -> dict[str, str]:
        """Return the headers of a call within a span."""
        headers = {TRACEPARENT: self.header(span_id)}
        return headers | ({TRACESTATE: self.state} if self.state else {})

    def headers(self, span_id: int) -> str:
        """Return the header lines of a call within a span, with line breaks."""
        return header_lines(self.header_map(span_id))


def header_lines(headers: Mapping[str, str]) -> str:
    """Return headers as lines with line breaks."""
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items())


def passed_on(headers: Headers) -> dict[str, str]:
    """Return valid trace headers to forward unchanged, as the specification asks of proxies."""
    context = read_context(headers)
    if context is None:
        return {}
    parent = {TRACEPARENT: headers.getall(TRACEPARENT, ())[0]}
    return parent | ({TRACESTATE: context.state} if context.state else {})


def read_context(headers: Headers) -> TraceContext | None:
    """Return a request's context, or None; an invalid `tracestate` does not void it."""
    parents = headers.getall(TRACEPARENT, ())
    if len(parents) != 1:
        return None
    match = _VALUE.fullmatch(parents[0])
    if match is None:
        return None
    version, trace_id, parent_id, flags, rest = match.groups()
    if version == "ff" or (version == "00" and rest) or trace_id == _NO_TRACE:
        return None
    if parent_id == _NO_SPAN:
        return None
    state = ",".join(headers.getall(TRACESTATE, ()))
    is_sampled = bool(int(flags, 16) & 1)
    return TraceContext(trace_id, int(parent_id, 16), is_sampled, _checked_state(state))


def new_trace_id() -> str:
    """Return a random trace id."""
    return f"{random.getrandbits(128) or 1:032x}"


def new_span_id() -> int:
    """Return a random span id, 64 bits."""
    return random.getrandbits(64) or 1


def is_in_ratio(trace_id: str, ratio: float) -> bool:
    """True if a trace is sampled, by its last 56 random bits (OpenTelemetry, TraceIdRatioBased)."""
    return int(trace_id[-14:], 16) < ratio * 2**56


def _checked_state(state: str) -> str:
    """Return a valid `tracestate`, else ""."""
    if not state or len(state) > _MAX_STATE_CHARS:
        return ""
    members = [member.strip(" \t") for member in state.split(",")]
    members = [member for member in members if member]
    names = {member.partition("=")[0] for member in members}
    good = len(members) <= _MAX_MEMBERS and len(names) == len(members)
    return ",".join(members) if good and all(map(_MEMBER.fullmatch, members)) else ""
