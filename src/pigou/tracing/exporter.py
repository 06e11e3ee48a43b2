"""The span exporter: a bounded queue, and a thread that sends it by OTLP/HTTP."""

from __future__ import annotations

import gzip
import logging
import random
import socket
import ssl
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import closing
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import NamedTuple
from urllib.parse import urlsplit

from prometheus_client.core import Metric

from pigou import __version__
from pigou.config import ConfigError
from pigou.metric_rows import counter_family, gauge_family
from pigou.tracing.config import ExportTarget
from pigou.tracing.otlp import CONTENT_TYPE, encode_spans, frame, rejected_spans
from pigou.tracing.request_trace import AttributeValue, RequestTrace

_log = logging.getLogger("pigou.tracing")

#: Reasons of dropped spans: `SpanExporter.dropped`.
REASONS = ("queue_full", "rejected", "refused", "unreachable")
#: Limits of queued spans, and spans per batch.
MAX_QUEUED_SPANS, MAX_BATCH_SPANS = 16_384, 512
#: Longest seconds a span waits before sending.
INTERVAL_S = 1.0
#: Tries of a batch, and seconds of the first pause; pauses double up to the last.
_MAX_TRIES, _BACKOFF_S, _MAX_BACKOFF_S = 5, 0.5, 8.0
_MAX_RETRY_AFTER_S = 30.0
#: Statuses that OTLP/HTTP lets a client retry.
_RETRYABLE = (429, 502, 503, 504)
_MAX_ANSWER_BYTES = 2**20
_WARN_EVERY_S = 60.0
#: OTLP ports; seconds of the protocol probe; bytes of an HTTP/2 frame header.
_GRPC_PORT, _HTTP_PORT, _PROBE_S, _FRAME_HEAD_BYTES = 4317, 4318, 2.0, 9


class ExportAnswer(NamedTuple):
    """A receiver's answer: status, Retry-After header, and body."""

    status: int
    retry_after: str
    body: bytes


Post = Callable[[bytes], ExportAnswer]


class SpanExporter:
    """Sends the spans of requests; only one thread may call `put`."""

    def __init__(
        self, target: ExportTarget, resource: Mapping[str, AttributeValue],
        post: Post | None = None, *, interval_s: float = INTERVAL_S, backoff_s: float = _BACKOFF_S,
    ) -> None:  # fmt: skip
        self._post = post or HTTPPost(target)
        self._before, self._after = frame(resource)
        self._interval_s, self._backoff_s = interval_s, backoff_s
        self._url = target.url
        self._compress = target.compress
        self._queue: deque[tuple[int, bytes]] = deque()
        self._put_total = self._taken_total = 0  # each is written by one thread
        self._wake, self._closing = threading.Event(), threading.Event()
        self._warned_s = -_WARN_EVERY_S
        self.exported = self.retries = 0
        # dropped spans by reason: queue_full, rejected, refused (a permanent status), unreachable
        # (all tries failed)
        self.dropped: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)

    @property
    def queued(self) -> int:
        """Queued spans."""
        return self._put_total - self._taken_total

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, trace: RequestTrace) -> None:
        """Queue an ended request's spans; encode here, as the sending thread would need the GIL."""
        count, queued = len(trace.collected), self.queued
        if queued + count > MAX_QUEUED_SPANS:
            self.dropped["queue_full"] += count
            return
        self._queue.append((count, encode_spans(trace)))
        self._put_total += count
        if queued + count >= MAX_BATCH_SPANS > queued:
            self._wake.set()

    def close(self, timeout_s: float = 3.0) -> None:
        """Send the queue once, within `timeout_s`; then stop."""
        self._closing.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            self._wake.wait(self._interval_s)
            self._wake.clear()
            while self._queue:
                self._send(*self._take())
            if self._closing.is_set():
                return

    def _take(self) -> tuple[int, list[bytes]]:
        count, spans = self._queue.popleft()
        batch = [spans]
        while self._queue and count + self._queue[0][0] <= MAX_BATCH_SPANS:
            more, spans = self._queue.popleft()
            batch.append(spans)
            count += more
        self._taken_total += count
        return count, batch

    def _send(self, count: int, batch: list[bytes]) -> None:
        body = self._before + b",".join(batch) + self._after
        if self._compress:
            body = gzip.compress(body, 1)
        for tries in range(1, _MAX_TRIES + 1):
            pause_s = min(_MAX_BACKOFF_S, self._backoff_s * 2 ** (tries - 1))
            pause_s *= random.uniform(0.5, 1.0)
            try:
                answer = self._post(body)
            except (OSError, HTTPException) as error:
                why, reason = str(error) or type(error).__name__, "unreachable"
            else:
                if 200 <= answer.status < 300:
                    rejected = min(rejected_spans(answer.body), count)
                    self.exported += count - rejected
                    self.dropped["rejected"] += rejected
                    return
                why = f"status {answer.status}"
                reason = "unreachable" if answer.status in _RETRYABLE else "refused"
                if answer.retry_after.isdecimal():
                    pause_s = min(_MAX_RETRY_AFTER_S, float(answer.retry_after))
            if reason == "refused" or tries == _MAX_TRIES or self._closing.wait(pause_s):
                break
            self.retries += 1
        self.dropped[reason] += count
        self._warn(count, why)

    def _warn(self, count: int, why: str) -> None:
        if time.monotonic() - self._warned_s >= _WARN_EVERY_S:
            self._warned_s = time.monotonic()
            _log.warning("%d spans were dropped: %s answered with %s", count, self._url, why)


def check_not_grpc(target: ExportTarget) -> None:
    """Raise ConfigError for a gRPC-only receiver; an unreachable one may come up later."""
    port = urlsplit(target.url).port
    if port != _GRPC_PORT and not _answers_in_http2(target):
        return
    raise ConfigError(
        f"the OTLP endpoint {target.url} is a gRPC receiver; traces are sent by OTLP/HTTP alone: "
        f"give its HTTP port, mostly {_HTTP_PORT}, as http://HOST:{_HTTP_PORT}/v1/traces"
    )


def _answers_in_http2(target: ExportTarget) -> bool:
    parts = urlsplit(target.url)
    is_secure = parts.scheme == "https"
    address = parts.hostname or "", parts.port or (443 if is_secure else 80)
    try:
        with closing(socket.create_connection(address, _PROBE_S)) as connection:
            connection.settimeout(_PROBE_S)
            stream = connection
            if is_secure:
                context = ssl.create_default_context(cafile=target.certificate or None)
                context.set_alpn_protocols(["http/1.1"])
                stream = context.wrap_socket(connection, server_hostname=address[0])
            stream.sendall(b"GET / HTTP/1.1\r\nhost: %b\r\n\r\n" % address[0].encode())
            answer = b""
            while len(answer) < _FRAME_HEAD_BYTES and (data := stream.recv(_FRAME_HEAD_BYTES)):
                answer += data
    except ssl.SSLError as error:
        return "NO_APPLICATION_PROTOCOL" in (error.reason or "")
    except (OSError, ValueError):
        return False
    # The first frame of an HTTP/2 server is SETTINGS (4) or GOAWAY (7), of stream 0 (RFC 9113).
    return len(answer) == _FRAME_HEAD_BYTES and answer[3] in (4, 7) and not any(answer[5:])


class HTTPPost:
    """Posts bodies over one connection, reopened when closed."""

    def __init__(self, target: ExportTarget) -> None:
        parts = urlsplit(target.url)
        self._path = parts.path + (f"?{parts.query}" if parts.query else "")
        self._headers = {
            "content-type": CONTENT_TYPE,
            "user-agent": f"pigou/{__version__}",
            **({"content-encoding": "gzip"} if target.compress else {}),
            **target.headers,
        }
        host, timeout_s = parts.hostname or "", target.timeout_s
        if parts.scheme == "https":
            context = ssl.create_default_context(cafile=target.certificate or None)
            self._connection: HTTPConnection = HTTPSConnection(
                host, parts.port or 443, timeout=timeout_s, context=context
            )
        else:
            self._connection = HTTPConnection(host, parts.port or 80, timeout=timeout_s)

    def __call__(self, body: bytes) -> ExportAnswer:
        """Post a body; raises OSError or HTTPException."""
        try:
            self._connection.request("POST", self._path or "/", body, self._headers)
            response = self._connection.getresponse()
            answer = response.read(_MAX_ANSWER_BYTES)
            if not response.isclosed():
                self._connection.close()  # a longer answer is left unread
        except BaseException:
            self._connection.close()
            raise
        return ExportAnswer(response.status, response.getheader("retry-after", ""), answer)


def exporter_families(exporter: SpanExporter) -> list[Metric]:
    """Return the metrics `pigou_trace_*`: spans sent, dropped and queued."""
    lost = [((reason,), exporter.dropped[reason]) for reason in REASONS]
    return [
        counter_family(
            "pigou_trace_spans_exported", "Spans that the receiver took.", exporter.exported
        ),
        counter_family(
            "pigou_trace_spans_dropped", "Spans that the receiver did not take.", lost, "reason"
        ),
        counter_family(
            "pigou_trace_export_retries", "Batches that were sent again.", exporter.retries
        ),
        gauge_family("pigou_trace_spans_queued", "Spans that wait to be sent.", exporter.queued),
    ]
