"""Laws of OpenTelemetry's server metrics at the gateway."""

from __future__ import annotations

import aiohttp
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from tests.gateway.stub import Fleet, Script, Stub, serving

_BUCKETS = {
    "gen_ai_server_request_duration_seconds": "0.01 0.02 0.04 0.08 0.16 0.32 0.64 1.28 2.56 5.12 "
    "10.24 20.48 40.96 81.92",
    "gen_ai_server_time_to_first_token_seconds": "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 "
    "0.5 0.75 1.0 2.5 5.0 7.5 10.0",
    "gen_ai_server_time_per_output_token_seconds": "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 "
    "0.5 0.75 1.0 2.5",
}


async def families(fleet: Fleet) -> dict[str, Metric]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(fleet.url + "/metrics") as response,
    ):
        page = await response.text()
    return {each.name: each for each in text_string_to_metric_families(page)}


async def ask(fleet: Fleet, path: str, **body: object) -> int:
    async with (
        aiohttp.ClientSession() as session,
        session.post(fleet.url + path, json=body) as response,
    ):
        await response.read()
        return response.status


def counts(family: Metric) -> dict[tuple[str, str], float]:
    """Return the observations by operation and error."""
    return {
        (s.labels["gen_ai_operation_name"], s.labels.get("error_type", "")): s.value
        for s in family.samples if s.name.endswith("_count")
    }  # fmt: skip


async def test_names_attributes_and_buckets_are_those_of_the_conventions() -> None:
    async with serving(Stub("a", script=Script(delay_s=0.02))) as fleet:
        messages = [{"role": "user", "content": "hello"}]
        await ask(fleet, "/v1/chat/completions", messages=messages, stream=True, max_tokens=3)
        await ask(fleet, "/v1/completions", prompt="x", max_tokens=3)
        found = await families(fleet)
    for name, bounds in _BUCKETS.items():
        samples = found[name].samples
        buckets = [s.labels["le"] for s in samples if s.name.endswith("_bucket")]
        assert buckets[: len(bounds.split()) + 1] == [*bounds.split(), "+Inf"]
        assert {s.labels["gen_ai_provider_name"] for s in samples} == {"pigou"}
        assert {s.labels["gen_ai_request_model"] for s in samples} == {"stub"}
        assert {s.labels["gen_ai_response_model"] for s in samples} == {"stub"}
    duration, first, per_token = (counts(found[name]) for name in _BUCKETS)
    assert duration == {("chat", ""): 1, ("text_completion", ""): 1}
    assert first == per_token == {("chat", ""): 1}  # a whole reply has no first token
    sums = {s.name: s.value for s in found[list(_BUCKETS)[2]].samples if s.name.endswith("_sum")}
    assert min(sums.values()) >= 0.02


@pytest.mark.parametrize(("script", "error"), [(Script(status=400), "400"), (Script(), "404")])
async def test_a_failed_request_has_its_error_and_no_first_token(
    script: Script, error: str
) -> None:
    async with serving(Stub("a", script=script)) as fleet:
        path, body = "/v1/completions", {"prompt": "x", "stream": True}
        if error == "404":  # refused before it is known which model it is for: no model's request
            assert await ask(fleet, path, model="other", **body) == 404
        else:
            assert await ask(fleet, path, **body) == 400
        found = await families(fleet)
    expected = {("text_completion", error): 1.0} if error == "400" else {}
    assert counts(found["gen_ai_server_request_duration_seconds"]) == expected
    assert counts(found["gen_ai_server_time_to_first_token_seconds"]) == {}


async def test_names_that_clients_make_up_are_no_labels() -> None:
    async with serving(Stub("a")) as fleet:
        for name in ("made-up", "stub", None):
            await ask(fleet, "/v1/completions", prompt="x", max_tokens=1, model=name)
        found = await families(fleet)
    samples = found["gen_ai_server_request_duration_seconds"].samples
    assert {s.labels["gen_ai_request_model"] for s in samples} == {"stub"}
