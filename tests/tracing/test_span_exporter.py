"""The exporter loses no span silently: what a receiver does not take is counted."""

from __future__ import annotations

import socketserver
import threading
import time
from contextlib import nullcontext

import pytest
from multidict import CIMultiDict
from tests.lib.otlp_receiver import OTLPReceiver

from pigou.config import ConfigError
from pigou.tracing import exporter as exporter_module
from pigou.tracing.config import ExportTarget, TracingConfig
from pigou.tracing.exporter import ExportAnswer, SpanExporter, check_not_grpc, exporter_families
from pigou.tracing.request_trace import RequestTrace
from pigou.tracing.tracer import Tracer, open_tracer

RESOURCE = {"service.name": "test"}


def trace_of(spans: int) -> RequestTrace:
    trace = Tracer("test", 1.0, 0.0, 0, None).begin(CIMultiDict())
    for _ in range(spans):
        trace.phase("phase")
    return trace


def sending(target: ExportTarget, **rest: float) -> SpanExporter:
    made = SpanExporter(target, RESOURCE, interval_s=0.01, backoff_s=0.01, **rest)
    made.start()
    return made


@pytest.mark.parametrize(
    ("greeting", "refused"),
    [
        (b"\x00\x00\x06\x04\x00\x00\x00\x00\x00\x00\x05\x00\x10\x00\x00", True),
        (b"\x00\x00\x08\x07\x00\x00\x00\x00\x00" + b"\0" * 8, True),
        (b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n", False),
        (b"", False),
        (b"\0\0\6", False),
    ],
    ids=["settings", "goaway", "http", "nothing", "cut"],
)
def test_a_receiver_that_answers_in_http_2_is_refused(greeting: bytes, refused: bool) -> None:
    class Greeter(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.sendall(greeting)
            self.request.recv(4096)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Greeter) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        target = ExportTarget(url=f"http://127.0.0.1:{server.server_address[1]}/v1/traces")
        with pytest.raises(ConfigError, match="4318") if refused else nullcontext():
            check_not_grpc(target)
        server.shutdown()


def test_the_port_of_grpc_is_refused_and_a_receiver_that_is_away_is_not() -> None:
    with pytest.raises(ConfigError, match="4318"):
        open_tracer(TracingConfig(otlp_traces_endpoint="http://127.0.0.1:4317"), "gateway")
    check_not_grpc(ExportTarget(url="http://127.0.0.1:9/v1/traces"))


def test_spans_arrive_with_the_targets_headers_also_packed() -> None:
    for compress in (False, True):
        with OTLPReceiver() as receiver:
            target = ExportTarget(url=receiver.url, headers={"x-key": "k"}, compress=compress)
            made = sending(target)
            made.put(trace_of(3))
            spans = receiver.wait(3)
            assert receiver.headers["x-key"] == "k"
            assert {span["resource"]["service.name"] for span in spans} == {"test"}
            made.close()
            assert (made.exported, made.queued, made.dropped.total()) == (3, 0, 0)


def test_a_receiver_that_is_busy_is_asked_again() -> None:
    with OTLPReceiver([(503, {}), (429, {"retry-after": "0"})]) as receiver:
        made = sending(ExportTarget(url=receiver.url))
        made.put(trace_of(2))
        receiver.wait(2)
        made.close()
        assert (receiver.requests, made.retries, made.exported) == (3, 2, 2)


@pytest.mark.parametrize(
    ("status", "tries", "reason"), [(400, 1, "refused"), (503, 5, "unreachable")]
)
def test_what_is_refused_or_fails_each_time_is_dropped_and_counted(
    status: int, tries: int, reason: str
) -> None:
    with OTLPReceiver([(status, {})] * 9) as receiver:
        made = sending(ExportTarget(url=receiver.url))
        made.put(trace_of(4))
        while not made.dropped[reason]:
            time.sleep(0.005)
        assert (made.dropped[reason], receiver.requests) == (4, tries)
        made.close()


def test_rejected_spans_of_a_partial_success_are_counted() -> None:
    with OTLPReceiver(body='{"partialSuccess":{"rejectedSpans":"1"}}') as receiver:
        made = sending(ExportTarget(url=receiver.url))
        made.put(trace_of(3))
        receiver.wait(3)
        made.close()
        assert (made.exported, made.dropped["rejected"]) == (2, 1)


def test_a_full_queue_drops_what_comes_and_never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter_module, "MAX_QUEUED_SPANS", 10)
    blocked = threading.Event()

    def post(_: bytes) -> ExportAnswer:
        blocked.wait(10)
        return ExportAnswer(200, "", b"")

    made = SpanExporter(ExportTarget(url="http://x"), RESOURCE, post)  # not started: nobody takes
    for _ in range(5):
        made.put(trace_of(4))
    assert (made.queued, made.dropped["queue_full"]) == (8, 12)
    made.start()
    blocked.set()
    made.close()
    assert (made.exported, made.queued) == (8, 0)


def test_batches_are_bounded_and_the_end_sends_what_waits() -> None:
    sizes: list[int] = []

    def post(body: bytes) -> ExportAnswer:
        sizes.append(body.count(b'"spanId"'))
        return ExportAnswer(200, "", b"{}")

    made = SpanExporter(ExportTarget(url="http://x"), RESOURCE, post, interval_s=60)
    made.start()
    for _ in range(30):
        made.put(trace_of(20))
    made.close()
    assert sum(sizes) == made.exported == 600
    assert max(sizes) <= exporter_module.MAX_BATCH_SPANS


def test_the_end_does_not_wait_for_a_receiver_that_is_away() -> None:
    made = SpanExporter(ExportTarget(url="http://127.0.0.1:9"), RESOURCE, backoff_s=30)
    made.start()
    made.put(trace_of(2))
    began = time.monotonic()
    made.close(60.0)
    assert time.monotonic() - began < 30
    assert made.dropped["unreachable"] == 2


def test_the_metrics_have_what_arrived_and_what_was_lost() -> None:
    made = SpanExporter(ExportTarget(url="http://x"), RESOURCE)
    made.exported = 7
    made.dropped["refused"] = 2
    samples = {
        (sample.name, sample.labels.get("reason", "")): sample.value
        for family in exporter_families(made)
        for sample in family.samples
    }
    assert samples["pigou_trace_spans_exported_total", ""] == 7
    assert samples["pigou_trace_spans_dropped_total", "refused"] == 2
    assert samples["pigou_trace_spans_dropped_total", "queue_full"] == 0
    assert samples["pigou_trace_spans_queued", ""] == 0
