"""A small OTLP/HTTP receiver: a server on loopback that keeps the spans it was sent."""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self


class OTLPReceiver:
    """Takes what is posted to `/v1/traces` as OTLP in JSON, or as Protocol Buffers undecoded.

    Attributes:
        spans: that came, each with the attributes of its resource under `resource`.
        bodies: of requests in Protocol Buffers, as they came.
        headers: of the last request, names in lower case.
        answers: status and headers of the next answers; 200 once there are none left.
    """

    def __init__(
        self, answers: Sequence[tuple[int, dict[str, str]]] = (), body: str = "{}"
    ) -> None:
        self.spans: list[dict[str, Any]] = []
        self.bodies: list[bytes] = []
        self.headers: dict[str, str] = {}
        self.answers = list(answers)
        self.requests = 0
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["content-length"]))
                receiver.headers = {name.lower(): value for name, value in self.headers.items()}
                receiver.requests += 1
                status, further = receiver.answers.pop(0) if receiver.answers else (200, {})
                if status == 200 and self.path == "/v1/traces":
                    receiver._take(data)
                answer = body.encode() if self.path == "/v1/traces" else b"{}"
                self.send_response(status if self.path == "/v1/traces" else 404)
                for name, value in further.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True

    @property
    def url(self) -> str:
        """Address of the route for traces."""
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1/traces"

    def _take(self, data: bytes) -> None:
        if self.headers.get("content-encoding") == "gzip":
            data = gzip.decompress(data)
        if "json" not in self.headers["content-type"]:
            self.bodies.append(data)
            return
        for entry in json.loads(data)["resourceSpans"]:
            resource = attributes(entry["resource"])
            for scope in entry["scopeSpans"]:
                self.spans += [span | {"resource": resource} for span in scope["spans"]]

    def wait(self, count: int, seconds: float = 10.0) -> list[dict[str, Any]]:
        """Return the spans once there are so many."""
        end = time.monotonic() + seconds
        while len(self.spans) < count:
            assert time.monotonic() < end, f"{len(self.spans)} of {count} spans came"
            time.sleep(0.01)
        return list(self.spans)

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._server.shutdown()
        self._server.server_close()


def attributes(holder: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of a span, an event or a resource by name."""
    return {pair["key"]: value(pair["value"]) for pair in holder.get("attributes", ())}


def value(given: dict[str, Any]) -> Any:
    """Return an attribute's value, by its kind in OTLP."""
    ((kind, content),) = given.items()
    if kind == "arrayValue":
        return [value(each) for each in content["values"]]
    return int(content) if kind == "intValue" else content


def duration_ns(span: dict[str, Any]) -> int:
    """Return how long a span took."""
    return int(span["endTimeUnixNano"]) - int(span["startTimeUnixNano"])
