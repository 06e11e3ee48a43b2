"""Laws of traces at the gateway: one trace from the client to its workers, phases without a gap."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.gateway.stub import Fleet, Script, Stub, serving

from pigou.config import ControlConfig
from pigou.gateway.auth.keys import Keys, make_key
from pigou.request import Role
from pigou.tracing.request_trace import RequestTrace, Span, attributes_of
from pigou.tracing.tracer import Tracer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TRACE, CLIENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = {"traceparent": f"00-{TRACE}-{CLIENT}-01", "tracestate": "vendor=1"}
PROMPT = "a prompt that is longer than one block of sixteen tokens, surely so it is"
TOLL = ControlConfig(policy="toll")


def tracer(slow_s: float = 10.0) -> Tracer:
    return Tracer("gateway", 1.0, slow_s, 64, None)


async def ask(
    fleet: Fleet, path: str = TEXT, headers: dict[str, str] | None = None, **body: Any
) -> int:
    prompt = {"messages": [{"role": "user", "content": PROMPT}]} if path == CHAT else {
        "prompt": PROMPT
    }  # fmt: skip
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            fleet.url + path, json={"model": "stub", **prompt, **body}, headers=headers or PARENT
        ) as response,
    ):
        await response.read()
        return response.status


async def get(fleet: Fleet, path: str, key: str = "") -> tuple[int, Any]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.get(fleet.url + path) as response,
    ):
        return response.status, json.loads(await response.read())


def said(span: Span) -> dict[str, Any]:
    """Return the attributes of a span."""
    return dict(zip(*attributes_of(span), strict=True))


def phases(trace: RequestTrace) -> list[Span]:
    """Return the phases of a request in their order, which add up to the root."""
    root = trace.spans[-1]
    found = sorted(
        (span for span in trace.spans if span.parent_id == root.id), key=lambda s: s.start_ns
    )
    assert sum(s.end_ns - s.start_ns for s in found) == root.end_ns - root.start_ns
    return found


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_is_one_trace_from_the_client_to_both_workers(stream: bool) -> None:
    made = tracer()
    stubs = [Stub("p", Role.PREFILL), Stub("d", Role.DECODE)]
    async with serving(*stubs, tracer=made) as fleet:
        assert (
            await ask(fleet, CHAT, stream=stream, max_tokens=5, temperature=0.5, stop=["x"]) == 200
        )
    (trace,) = made.memory.find(TRACE)
    root, found = trace.spans[-1], phases(trace)
    assert [span.name for span in found] == [
        "receive", "queue", "route", "prefill", "decode", "deliver",
    ]  # fmt: skip
    assert (root.name, f"{root.parent_id:016x}") == ("chat stub", CLIENT)
    legs = {span.name: span for span in found}
    for stub, leg in (("p", legs["prefill"]), ("d", legs["decode"])):
        (seen,) = fleet.stubs[stub].seen
        assert seen.headers["traceparent"] == f"00-{TRACE}-{leg.id:016x}-01"
        assert seen.headers["tracestate"] == "vendor=1"
        assert said(leg)["pigou.worker"] == stub
    assert ("stream" in [span.name for span in trace.spans]) == stream
    told = said(root)
    assert told["gen_ai.operation.name"] == "chat"
    assert told["gen_ai.request.model"] == "stub"
    assert (told["gen_ai.request.max_tokens"], told["gen_ai.request.temperature"]) == (5, 0.5)
    assert told["gen_ai.request.stop_sequences"] == ("x",)
    assert told["gen_ai.usage.output_tokens"] == 5
    assert told["gen_ai.response.finish_reasons"] == ("length",)
    assert ("gen_ai.response.time_to_first_chunk" in told) == stream
    assert not [value for value in told.values() if PROMPT[:20] in str(value)]


async def test_a_decision_has_its_prices_and_tolls_as_attributes() -> None:
    made = tracer()
    stubs = [Stub("d", Role.BOTH), Stub("e", Role.BOTH)]
    async with serving(*stubs, control=TOLL, tracer=made) as fleet:
        assert await ask(fleet) == 200
        why = next(iter(fleet.plane_driver.plane.router.ledger.latest()))
    (trace,) = made.memory.find(TRACE)
    assert trace.spans[-1].name == "text_completion stub"
    route = next(span for span in trace.spans if span.name == "route")
    told = said(route)
    assert told["pigou.route.policy"] == why.policy
    assert told["pigou.route.price_s"] == pytest.approx(why.price[why.chosen])
    assert told["pigou.route.toll_s"] == pytest.approx(why.toll[why.chosen])
    assert told["pigou.route.candidates"] == 2
    parts = [value for name, value in told.items() if name.startswith("pigou.route.price.")]
    assert sum(map(float, parts)) == pytest.approx(told["pigou.route.price_s"])


@pytest.mark.parametrize("headers", [{"traceparent": "garbage"}, {"x": "y"}])
async def test_without_a_valid_traceparent_a_request_begins_a_trace(
    headers: dict[str, str],
) -> None:
    made = tracer()
    async with serving(Stub("a"), tracer=made) as fleet:
        assert await ask(fleet, headers=headers) == 200
    ((trace,),) = made.memory.latest(9)
    assert trace.spans[-1].parent_id == 0
    assert trace.context.trace_id in fleet.stubs["a"].seen[0].headers["traceparent"]


@pytest.mark.parametrize("stream", [False, True])
async def test_without_a_tracer_the_clients_trace_headers_are_passed_on(stream: bool) -> None:
    stubs = [Stub("p", Role.PREFILL), Stub("d", Role.DECODE)]
    async with serving(*stubs) as fleet:
        assert await ask(fleet, CHAT, PARENT, stream=stream) == 200
        assert await ask(fleet, TEXT, PARENT, stream=stream, n=2) == 200
        seen = [each.headers for stub in stubs for each in stub.seen]
        assert len(seen) >= 4
        assert [PARENT.items() <= headers.items() for headers in seen] == [True] * len(seen)
        broken = {"traceparent": "00-" + "0" * 32 + "-1-01", "tracestate": "vendor=1"}
        assert await ask(fleet, CHAT, broken, stream=stream) == 200
        assert not {"traceparent", "tracestate"} & stubs[1].seen[-1].headers.keys()


async def test_without_a_tracer_there_are_no_traces() -> None:
    async with serving(Stub("a")) as fleet:
        assert await ask(fleet) == 200
        assert (await get(fleet, "/traces"))[1] == {"tracing": False, "traces": []}
        status, body = await get(fleet, f"/traces/{TRACE}")
        assert (status, "--otlp-traces-endpoint" in body["error"]["message"]) == (404, True)


async def test_a_worker_that_fails_leaves_its_leg_and_the_next_one_in_the_trace() -> None:
    made = tracer()
    stubs = [Stub("a", script=Script(die_after=2, times=1)),
             Stub("b", script=Script(die_after=2, times=1)), Stub("c")]  # fmt: skip
    async with serving(*stubs, tracer=made) as fleet:
        assert await ask(fleet, stream=True, max_tokens=6) == 200
    (trace,) = made.memory.find(TRACE)
    found = phases(trace)
    legs = [span for span in found if span.name == "decode"]
    assert [bool(span.error) for span in legs][-1] is False
    assert legs[0].error == "broke"
    routes = [span for span in found if span.name == "route"]
    assert len(routes) == len(legs) > 1
    excluded = said(routes[1])["pigou.route.excluded"]
    assert excluded == (said(legs[0])["pigou.worker"],)


async def test_a_request_that_is_refused_or_fails_is_a_trace_too() -> None:
    made = tracer()
    async with serving(Stub("a", script=Script(status=500)), tracer=made) as fleet:
        unsampled = {"traceparent": f"00-{TRACE}-{CLIENT}-00"}
        assert await ask(fleet, headers=unsampled) == 502
        assert await ask(fleet, headers={"x": "y"}, temperature=-9) == 400
    bad, failed = (traces[0] for traces in made.memory.latest(9))
    assert (failed.context.trace_id, failed.spans[-1].error) == (TRACE, "502")
    assert said(bad.spans[-1])["error.type"] == "400"
    assert bad.spans[-1].error == ""  # by convention a client's fault is no error of the server's
    assert [span.name for span in phases(bad)] == ["receive"]


async def test_sequences_of_a_request_are_branches_with_phases_of_their_own() -> None:
    made = tracer()
    async with serving(Stub("a"), tracer=made) as fleet:
        assert await ask(fleet, n=2, max_tokens=3) == 200
    (trace,) = made.memory.find(TRACE)
    assert [span.name for span in phases(trace)] == [
        "receive", "choices", "deliver",
    ]  # fmt: skip
    for branch in (span for span in trace.spans if span.name == "choice"):
        below = [span for span in trace.spans if span.parent_id == branch.id]
        assert [span.name for span in below] == ["queue", "route", "decode"]


async def test_a_trace_is_shown_to_its_tenant_and_to_an_administrator(tmp_path: Path) -> None:
    made = tracer()
    (alice, a), (bob, b) = make_key("alice"), make_key("bob")
    admin, c = make_key("ops", admin=True)
    path = tmp_path / "keys"
    path.write_text("\n".join((a, b, c)))
    async with serving(Stub("a"), keys=Keys.read(path), tracer=made) as fleet:
        auth = {"authorization": f"Bearer {alice}"}
        assert await ask(fleet, headers=PARENT | auth) == 200
        for key in (alice, admin):
            status, shown = await get(fleet, f"/traces/{TRACE}", key)
            assert (status, shown["trace_id"]) == (200, TRACE)
            assert shown["spans"][0]["name"] == "text_completion stub"
            (row,) = (await get(fleet, "/traces", key))[1]["traces"]
            assert (await get(fleet, f"/traces/{row['id']}", key))[0] == 200
        assert (await get(fleet, f"/traces/{TRACE}", bob))[0] == 404
        assert (await get(fleet, "/traces", bob))[1]["traces"] == []
        assert (await get(fleet, "/traces"))[0] == 401


async def test_what_workers_know_is_joined_below_the_legs_and_nothing_else() -> None:
    made = tracer()
    spans: list[dict[str, Any]] = []

    async def known(request: Any) -> Any:
        from aiohttp import web

        assert request.path == f"/traces/{TRACE}"
        return web.json_response({"spans": spans})

    stub = Stub("a", routes={f"/traces/{TRACE}": known})
    async with serving(stub, tracer=made) as fleet:
        assert await ask(fleet) == 200
        leg = next(s for s in made.memory.find(TRACE)[0].spans if s.name == "decode")
        row = {"service": "w", "kind": "server", "start": 1.0, "duration_s": 0.0, "attributes": {},
               "events": [], "error": None}  # fmt: skip
        spans += [
            row | {"name": "llm_request", "span_id": "1" * 16, "parent_id": f"{leg.id:016x}"},
            row | {"name": "queue", "span_id": "2" * 16, "parent_id": "1" * 16},
            row | {"name": "other", "span_id": "3" * 16, "parent_id": "9" * 16},
        ]
        _, shown = await get(fleet, f"/traces/{TRACE}")
    depths = {span["name"]: span["depth"] for span in shown["spans"] if span["service"] == "w"}
    assert depths == {"llm_request": 2, "queue": 3}
