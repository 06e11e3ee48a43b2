"""One trace through real processes: spans of gateway and workers add up, and join."""

from __future__ import annotations

import asyncio
import logging
from itertools import pairwise
from typing import Any

import pytest
from tests.fleet.harness import PROMPT, running
from tests.lib.otlp_receiver import OTLPReceiver, attributes, duration_ns

from pigou.config import ControlConfig

TRACE, CLIENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = {"traceparent": f"00-{TRACE}-{CLIENT}-01"}
SLEEP = ("--executor", "sleep", "--sleep-base", "3000000", "--repeat", "1")
LOGS = ("--log-format", "json", "--access-log")
_MS = 1_000_000


def below(spans: list[dict[str, Any]], span: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the spans right below one, by their begin."""
    found = [each for each in spans if each.get("parentSpanId") == span["spanId"]]
    return sorted(found, key=lambda each: int(each["startTimeUnixNano"]))


def only(spans: list[dict[str, Any]], name: str) -> dict[str, Any]:
    (span,) = [each for each in spans if each["name"] == name]
    return span


def adds_up(spans: list[dict[str, Any]], root: dict[str, Any]) -> list[str]:
    """Check that the phases of a process add up to its root; return their names."""
    phases = below(spans, root)
    assert abs(sum(map(duration_ns, phases)) - duration_ns(root)) < _MS
    for one, next_one in pairwise(phases):
        assert abs(int(next_one["startTimeUnixNano"]) - int(one["endTimeUnixNano"])) < _MS
    return [phase["name"] for phase in phases]


async def test_spans_of_gateway_prefill_and_decode_worker_are_one_trace_and_add_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pigou.access")
    with OTLPReceiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", receiver.url)
        arguments = (*SLEEP, *LOGS, "--otlp-traces-endpoint", receiver.url)
        control = ControlConfig(policy="least-loaded")
        async with running(1, 1, 0, arguments=arguments, control=control) as (_, client):
            body = {"prompt": PROMPT * 4, "max_tokens": 8, "stream": True, "ignore_eos": True}
            url = client.url + "/v1/completions"
            async with client.session.post(url, json=body, headers=PARENT) as response:
                await response.read()
            async with client.session.get(f"{client.url}/traces/{TRACE}") as response:
                shown = await response.json()
            async with client.session.get(f"{client.url}/traces/{TRACE}?format=text") as response:
                lines = (await response.text()).splitlines()
        spans = await asyncio.to_thread(receiver.wait, 22)
    assert {span["traceId"] for span in spans} == {TRACE}
    (root,) = [span for span in spans if span.get("parentSpanId") == CLIENT]
    names = adds_up(spans, root)
    assert [n for n in names if n not in ("assemble", "tokenize", "hash")] == [
        "receive", "queue", "route", "prefill", "decode", "deliver",
    ]  # fmt: skip
    legs = {}
    for leg in ("prefill", "decode"):
        (request,) = [s for s in below(spans, only(below(spans, root), leg)) if s["kind"] == 2]
        assert request["name"] == "llm_request"
        assert request["resource"]["service.name"] == "pigou-worker"
        legs[leg] = request, adds_up(spans, request)
    assert legs["prefill"][1] == [
        "receive", "tokenize", "prepare", "queue", "prefill", "deliver",
    ]  # fmt: skip
    assert legs["decode"][1] == [
        "receive", "tokenize", "prepare", "queue", "transfer", "prefill", "decode", "deliver",
    ]  # fmt: skip
    told = attributes(legs["decode"][0])
    assert told["gen_ai.usage.output_tokens"] == 8
    assert told["gen_ai.usage.cache_read.input_tokens"] > 0
    transfer = only(below(spans, legs["decode"][0]), "transfer")
    assert attributes(transfer)["pigou.kv.tokens"] > 0
    prefill = only(below(spans, legs["prefill"][0]), "prefill")
    assert [event["name"] for event in prefill["events"]] == ["prefill step"]
    # The page's view of it has the workers' spans as well.
    assert {span["service"] for span in shown["spans"]} == {"pigou-gateway", "pigou-worker"}
    assert len(shown["spans"]) == len(lines) > 15
    fields = [getattr(record, "fields", {}) for record in caplog.records]
    lines_of = [each for each in fields if each.get("path") == "/v1/completions"]
    assert [each["trace_id"] for each in lines_of] == [TRACE] * 3
    assert all(each["request_id"] for each in lines_of)
