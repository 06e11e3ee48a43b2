"""A stock vLLM behind the gateway joins the client's trace; the real OTLP schema reads Pigou's."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.fleet.harness import PROMPT, running
from tests.fleet.test_fleet_traces import CLIENT, PARENT, TRACE, adds_up, below, only
from tests.lib.otlp_receiver import OTLPReceiver, attributes
from tests.peers.conftest import peer_model, vllm_venv

from benchmarks.lib.peers import start_vllm
from benchmarks.lib.servers import Server
from pigou.fleet.config import AttachedWorker
from pigou.tracing.otlp import frame

__all__ = ["peer_model", "vllm_venv"]

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

#: Reads an export request of opentelemetry-proto from stdin; writes it as JSON, ids in hexadecimal.
DECODE = """
import sys, json
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
data = sys.stdin.buffer.read()
if data[:1] == b"{":
    request = json_format.Parse(data, ExportTraceServiceRequest())
else:
    request = ExportTraceServiceRequest.FromString(data)
out = json_format.MessageToDict(request)
spans = [s for r in request.resource_spans for c in r.scope_spans for s in c.spans]
dicts = [s for r in out["resourceSpans"] for c in r["scopeSpans"] for s in c["spans"]]
for span, made in zip(spans, dicts):
    made |= {"traceId": span.trace_id.hex(), "spanId": span.span_id.hex(),
             "parentSpanId": span.parent_span_id.hex()}
print(json.dumps(dicts))
"""


def decoded(venv: Path, body: bytes) -> list[dict[str, Any]]:
    """Return the spans of a request, as opentelemetry-proto reads them."""
    done = subprocess.run(
        [str(venv / "bin" / "python"), "-c", DECODE], input=body, stdout=subprocess.PIPE, check=True
    )
    spans: list[dict[str, Any]] = json.loads(done.stdout)
    return spans


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[OTLPReceiver]:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    with OTLPReceiver() as made:
        yield made


@pytest.fixture
def traced_vllm(
    vllm_venv: Path, peer_model: Path, receiver: OTLPReceiver, tmp_path: Path
) -> Iterator[Server]:
    server = start_vllm(
        peer_model, log=tmp_path / "vllm.log", block_size=32,
        extra=["--otlp-traces-endpoint", receiver.url],
    )  # fmt: skip
    with server:
        server.wait_healthy()
        yield server


async def test_a_real_vllm_joins_the_trace_below_the_leg_that_asked_it(
    vllm_venv: Path, peer_model: Path, receiver: OTLPReceiver, traced_vllm: Server,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", receiver.url)
    worker = AttachedWorker(id="attached-0", url=traced_vllm.url)
    async with running(0, 0, 0, attach=(worker,)) as (_, client):
        body = {"model": peer_model.name, "prompt": PROMPT, "max_tokens": 8, "stream": True}
        url = client.url + "/v1/completions"
        async with client.session.post(url, json=body, headers=PARENT) as response:
            assert response.status == 200
            await response.read()
        spans = await asyncio.to_thread(receiver.wait, 6)
        for _ in range(200):  # its batches are sent every 5 s
            if any(bytes.fromhex(TRACE) in each for each in receiver.bodies):
                break
            await asyncio.sleep(0.1)
    (root,) = [span for span in spans if span.get("parentSpanId") == CLIENT]
    assert adds_up(spans, root)[-2:] == ["decode", "deliver"]
    leg = only(below(spans, root), "decode")
    theirs = [span for each in receiver.bodies for span in decoded(vllm_venv, each)]
    (request,) = [span for span in theirs if span["traceId"] == TRACE]
    assert request["name"] == "llm_request"
    assert request["parentSpanId"] == leg["spanId"]
    assert attributes(request)["gen_ai.usage.completion_tokens"] == 8
    # Pigou's own spans are read by the schema, which refuses fields that it does not know.
    before, after = frame({"service.name": "pigou-gateway"})
    own = [{name: value for name, value in span.items() if name != "resource"} for span in spans]
    ours = before + msgspec.json.encode(own)[1:-1] + after
    names = [span["name"] for span in decoded(vllm_venv, ours)]
    assert names == [span["name"] for span in spans]
