"""Trace contexts are read as W3C says, and passed on."""

from __future__ import annotations

import pytest
from multidict import CIMultiDict

from pigou.tracing.trace_context import (
    TraceContext,
    is_in_ratio,
    new_span_id,
    new_trace_id,
    read_context,
)

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
VALID = f"00-{TRACE}-{PARENT}-01"


def read(*pairs: tuple[str, str]) -> TraceContext | None:
    return read_context(CIMultiDict(pairs))


def test_a_valid_traceparent_is_read() -> None:
    assert read(("Traceparent", VALID)) == TraceContext(TRACE, int(PARENT, 16), True)
    off = read(("traceparent", VALID[:-1] + "0"))
    assert off is not None
    assert not off.is_sampled


@pytest.mark.parametrize(
    ("value", "sampled"),
    [
        (f"00-{TRACE}-{PARENT}-03", True),  # further flags are ignored
        (f"cc-{TRACE}-{PARENT}-01-what-the-future-holds", True),
        (f"cc-{TRACE}-{PARENT}-00", False),
    ],
)
def test_later_versions_and_flags_are_read_as_far_as_they_are_known(
    value: str, sampled: bool
) -> None:
    context = read(("traceparent", value))
    assert context is not None
    assert context.is_sampled == sampled


@pytest.mark.parametrize(
    "value",
    [
        "",
        "garbage",
        VALID.upper(),
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-01-extra",
        f"cc-{TRACE}-{PARENT}-01x",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[:-1]}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-1",
        f" {VALID}",
        VALID + "\n",
    ],
)
def test_an_invalid_traceparent_is_ignored(value: str) -> None:
    assert read(("traceparent", value)) is None


def test_two_traceparents_are_none() -> None:
    assert read(("traceparent", VALID), ("traceparent", VALID)) is None
    assert read() is None


def test_tracestate_is_passed_on_in_its_order() -> None:
    context = read(("traceparent", VALID), ("tracestate", "b=1, a@v=x y"), ("tracestate", "c=3"))
    assert context is not None
    assert context.state == "b=1,a@v=x y,c=3"
    assert context.headers(1) == (
        f"traceparent: 00-{TRACE}-{1:016x}-01\r\ntracestate: b=1,a@v=x y,c=3\r\n"
    )


@pytest.mark.parametrize(
    "state",
    ["a=1,a=2", "A=1", "a", "a=é", ",".join(f"k{i}=1" for i in range(33)), "a=" + "x" * 257],
)
def test_an_invalid_tracestate_is_left_out_and_voids_nothing(state: str) -> None:
    context = read(("traceparent", VALID), ("tracestate", state))
    assert context == TraceContext(TRACE, int(PARENT, 16), True)


def test_the_context_of_a_child_is_read_back() -> None:
    context = TraceContext(new_trace_id(), 0, False)
    child = read(("traceparent", context.header(span_id := new_span_id())))
    assert child == TraceContext(context.trace_id, span_id, False)


def test_the_ratio_takes_its_share_and_the_same_one_everywhere() -> None:
    ids = [new_trace_id() for _ in range(4000)]
    tenth = {id for id in ids if is_in_ratio(id, 0.1)}
    assert 300 < len(tenth) < 500
    assert tenth <= {id for id in ids if is_in_ratio(id, 0.3)}
    assert all(is_in_ratio(id, 1.0) for id in ids)
    assert not any(is_in_ratio(id, 0.0) for id in ids)
