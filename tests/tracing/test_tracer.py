"""The tracer keeps what is sampled, what failed and what was slow; phases add up to the root."""

from __future__ import annotations

import json

from multidict import CIMultiDict

from pigou.request import SECOND
from pigou.tracing.otlp import encode_spans, frame, rejected_spans
from pigou.tracing.request_trace import MAX_EVENTS, RequestTrace
from pigou.tracing.tracer import Tracer
from pigou.tracing.waterfall import as_text, spans_view, waterfall

TRACE = "0af7651916cd43dd8448eb211c80319c"
SAMPLED = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
UNSAMPLED = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-00"}


def tracer(share: float = 1.0, slow_s: float = 10.0, max_traces: int = 8) -> Tracer:
    return Tracer("test", share, slow_s, max_traces, None)


def begin(made: Tracer, headers: dict[str, str]) -> RequestTrace:
    return made.begin(CIMultiDict(headers))


def is_kept(made: Tracer, headers: dict[str, str], *, failed: bool = False, s: float = 0) -> bool:
    trace = begin(made, headers)
    trace.is_failed = failed
    trace.phase("all", end_ns=trace.start_ns + round(s * SECOND))
    made.end(trace, "request")
    return trace in made.memory.find(trace.context.trace_id)


def test_the_clients_flag_goes_before_the_ratio() -> None:
    assert is_kept(tracer(share=0.0), SAMPLED)
    assert not is_kept(tracer(share=1.0), UNSAMPLED)
    assert is_kept(tracer(share=1.0), {})
    assert not is_kept(tracer(share=0.0), {})


def test_what_failed_or_was_slow_is_kept_though_it_is_not_sampled() -> None:
    assert is_kept(tracer(), UNSAMPLED, failed=True)
    assert is_kept(tracer(slow_s=2.0), UNSAMPLED, s=2.5)
    assert not is_kept(tracer(slow_s=2.0), UNSAMPLED, s=1.5)
    assert not is_kept(tracer(slow_s=0.0), UNSAMPLED, failed=True, s=100)


def test_phases_add_up_to_the_root_whatever_their_ends_say() -> None:
    trace = begin(tracer(), SAMPLED)
    trace.phase("one")
    trace.phase("early", end_ns=trace.start_ns - 5)  # before its begin: it is empty
    trace.begin_leg()
    trace.event("x", 1)
    leg = trace.end_leg("leg")
    trace.phase("last")
    root = trace.end("root")
    phases = [span for span in trace.spans if span.parent_id == root.id]
    assert sum(span.end_ns - span.start_ns for span in phases) == root.end_ns - root.start_ns
    assert [span.start_ns for span in phases[1:]] == [span.end_ns for span in phases[:-1]]
    assert [event[0] for event in leg.events] == ["x"]


def test_a_server_that_is_asked_gets_the_span_that_it_belongs_below() -> None:
    trace = begin(tracer(), SAMPLED | {"tracestate": "v=1"})
    assert trace.outgoing == ""
    trace.begin_leg()
    assert trace.outgoing.startswith(f"traceparent: 00-{TRACE}-")
    outgoing = trace.outgoing
    leg = trace.end_leg("decode")
    assert f"-{leg.id:016x}-01\r\ntracestate: v=1\r\n" in outgoing
    assert trace.outgoing == ""


def test_the_memory_is_bounded_and_finds_a_trace_by_its_requests() -> None:
    made = tracer(max_traces=3)
    for number in range(5):
        trace = begin(made, {})
        trace.request_id = f"r{number}"
        made.end(trace, "request")
    assert [traces[0].request_id for traces in made.memory.latest(9)] == ["r4", "r3", "r2"]
    assert made.memory.find("r0") == []
    (found,) = made.memory.find("r3")
    assert made.memory.find(found.context.trace_id) == [found]


def test_events_of_a_request_are_bounded() -> None:
    trace = begin(tracer(), SAMPLED)
    for number in range(MAX_EVENTS + 10):
        trace.event("step", number)
    trace.phase("all")
    assert len(trace.spans[0].events) == MAX_EVENTS


def test_spans_are_what_otlp_says_in_json() -> None:
    trace = begin(tracer(), SAMPLED | {"tracestate": "v=1"})
    trace.event("hit", trace.start_ns, (("at",), (1.5,)))
    made = ("text", "big", "yes", "odd", "l"), ('a"b', 2**53, True, float("nan"), ("x",))
    trace.phase("phase", lambda: made, error="broke")
    root = trace.end("chat m")
    before, after = frame({"service.name": "s"})
    document = json.loads(before + encode_spans(trace) + after)
    (entry,) = document["resourceSpans"]
    assert entry["resource"]["attributes"] == [
        {"key": "service.name", "value": {"stringValue": "s"}}
    ]
    phase, server = entry["scopeSpans"][0]["spans"]
    assert phase["attributes"] == [
        {"key": "text", "value": {"stringValue": 'a"b'}},
        {"key": "big", "value": {"intValue": "9007199254740992"}},
        {"key": "yes", "value": {"boolValue": True}},
        {"key": "odd", "value": {"stringValue": "nan"}},
        {"key": "l", "value": {"arrayValue": {"values": [{"stringValue": "x"}]}}},
    ]
    assert phase["status"] == {"code": 2, "message": "broke"}
    assert phase["events"][0]["timeUnixNano"] == str(trace.start_ns + trace.epoch_ns)
    assert (server["name"], server["kind"], server["traceId"]) == ("chat m", 2, TRACE)
    assert server["parentSpanId"] == "b7ad6b7169203331"
    assert phase["parentSpanId"] == server["spanId"] == f"{root.id:016x}"
    assert (server["traceState"], "traceState" in phase) == ("v=1", False)


def test_rejected_spans_are_read_of_any_answer() -> None:
    assert rejected_spans(b'{"partialSuccess":{"rejectedSpans":"3"}}') == 3
    for answer in (
        b"",
        b"{}",
        b"[]",
        b'{"partialSuccess":[]}',
        b"\xff",
        b'{"partialSuccess":null}',
    ):
        assert rejected_spans(answer) == 0


def test_a_waterfall_has_children_below_their_parents_by_time() -> None:
    trace = begin(tracer(), SAMPLED)
    trace.phase("first")
    trace.begin_leg()
    leg = trace.end_leg("decode")
    trace.child("stream", leg, leg.start_ns)
    trace.end("root")
    shown = waterfall(spans_view([trace], "test"))
    assert [(span["name"], span["depth"]) for span in shown] == [
        ("root", 0), ("first", 1), ("decode", 1), ("stream", 2),
    ]  # fmt: skip
    lines = as_text(shown).splitlines()
    assert len(lines) == 4
    assert lines[3].startswith("    stream")
    assert as_text([]) == ""
