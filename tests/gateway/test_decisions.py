"""Laws of explained decisions: overrides are honoured or refused, every choice can be looked at."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from tests.gateway.stub import Fleet, Script, Stub, serving

from pigou.config import ControlConfig
from pigou.gateway.auth.keys import Keys, make_key
from pigou.gateway.metrics import FastHistogram
from pigou.gateway.request_parsing import read_overrides
from pigou.request import Role
from pigou.wire.errors import APIError

TEXT = "/v1/completions"
TOLL = ControlConfig(policy="toll")
PROMPT = "a prompt that is longer than one block of sixteen tokens, surely so it is"


async def ask(fleet: Fleet, header: str | None = None, **body: Any) -> tuple[int, Any, Any]:
    headers = {} if header is None else {"X-Pigou-Routing": header}
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            fleet.url + TEXT, json={"prompt": PROMPT, **body}, headers=headers
        ) as response,
    ):
        return response.status, await response.read(), response.headers


async def get(fleet: Fleet, path: str, key: str = "") -> tuple[int, Any]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.get(fleet.url + path) as response,
    ):
        return response.status, json.loads(await response.read())


@pytest.mark.parametrize("stream", [False, True])
async def test_every_candidate_of_a_decision_is_explained_by_parts_that_add_up(
    stream: bool,
) -> None:
    stubs = [Stub("p", Role.PREFILL), Stub("d", Role.DECODE), Stub("e", Role.DECODE)]
    async with serving(*stubs, control=TOLL) as fleet:
        status, _, headers = await ask(fleet, stream=stream)
        assert status == 200
        id = headers["x-pigou-decision"]
        status, why = await get(fleet, f"/decisions/{id}")
        assert (status, why["id"], why["policy"]) == (200, id, "toll")
        pairs = {(each["prefill"], each["decode"]) for each in why["candidates"]}
        assert pairs == {(None, "d"), (None, "e"), ("p", "d"), ("p", "e")}
        [taken] = [each for each in why["candidates"] if each["chosen"]]
        assert taken["decode"] == headers["x-pigou-worker"] == why["decode"]
        assert taken["prefill"] == headers.get("x-pigou-prefill-worker") == why["prefill"]
        for each in why["candidates"]:
            assert math.isclose(sum(each["parts"].values()), each["cost"], rel_tol=1e-9)
            assert each["toll_seconds"] <= each["price_seconds"]
        assert why["cost"] == min(each["cost"] for each in why["candidates"])
        assert why["regret_seconds"] == pytest.approx(0.0)
        assert why["age_seconds"] < 60


async def test_the_latest_decisions_come_first_and_old_ones_are_forgotten() -> None:
    async with serving(Stub("a"), control=ControlConfig(max_decisions=3)) as fleet:
        ids = [(await ask(fleet))[2]["x-pigou-decision"] for _ in range(5)]
        _, found = await get(fleet, "/decisions?limit=2")
        assert [each["id"] for each in found["decisions"]] == [ids[4], ids[3]]
        _, found = await get(fleet, "/decisions")
        assert [each["id"] for each in found["decisions"]] == ids[:1:-1]
        for id, words in ((ids[0], "the last 3 are kept"), ("nonsense", "no decision's id")):
            status, answer = await get(fleet, f"/decisions/{id}")
            assert status == 404
            assert words in answer["error"]["message"]
        for limit in ("0", "-1", "x", "", "1001", "9" * 5000, "%C2%B2"):
            status, answer = await get(fleet, f"/decisions?limit={limit}")
            assert (status, answer["error"]["param"]) == (400, "limit"), limit


async def test_decisions_need_a_key_where_workers_do(tmp_path: Path) -> None:
    secret, line = make_key("ann")
    path = tmp_path / "keys"
    path.write_text(line)
    async with serving(Stub("a"), keys=Keys.read(path)) as fleet:
        for where in ("/decisions", "/decisions/x", "/workers"):
            assert (await get(fleet, where))[0] == 401
        assert (await get(fleet, "/decisions", secret))[0] == 200


async def test_overrides_hold_for_their_request_only() -> None:
    async with serving(Stub("a"), Stub("b"), control=TOLL) as fleet:
        status, _, headers = await ask(fleet, " temperature = 0.7 , urgency=2")
        assert status == 200
        _, why = await get(fleet, f"/decisions/{headers['x-pigou-decision']}")
        assert why["temperature"] == 0.7
        _, _, headers = await ask(fleet)
        _, why = await get(fleet, f"/decisions/{headers['x-pigou-decision']}")
        assert why["temperature"] == 0.0


BAD = ["nonsense=1", "temperature", "temperature=", "temperature=x", "temperature=nan",
       "temperature=-1", "temperature=inf", "temperature=1,temperature=2", "=1", ",", "",
       "a b=1", "temperature=1;toll=2", ",".join(f"a{i}=1" for i in range(40))]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
async def test_overrides_that_cannot_be_honoured_are_refused(stream: bool) -> None:
    async with serving(Stub("a")) as fleet:
        for header in BAD:
            status, body, _ = await ask(fleet, header, stream=stream)
            error = json.loads(body)["error"]
            assert (status, error["param"]) == (400, "X-Pigou-Routing"), header
            name = header.split("=")[0].strip()
            assert not name or "," in header or name in error["message"]
        assert fleet.stubs["a"].seen == []
        await fleet.settle()


@given(st.text(max_size=60))
def test_a_header_is_read_or_refused(text: str) -> None:
    try:
        found = read_overrides(text)
    except APIError:
        return
    assert all(math.isfinite(value) for value in found.values())
    assert read_overrides(",".join(f"{k}={v!r}" for k, v in found.items())) == found


async def test_the_gauges_say_what_the_page_says() -> None:
    async with serving(Stub("a", script=Script(delay_s=0.02)), Stub("b")) as fleet:
        running = [asyncio.create_task(ask(fleet, stream=True, max_tokens=60)) for _ in range(6)]
        while sum(fleet.metrics.itl.counts) <= 6:
            await asyncio.sleep(0.01)
        async with (
            aiohttp.ClientSession() as session,
            session.get(fleet.url + "/metrics") as response,
        ):
            page = await response.text()
        await asyncio.gather(*running)
    families = {each.name: each for each in text_string_to_metric_families(page)}
    for name in (
        "pigou_game_toll_seconds",
        "pigou_game_social_ratio",
        "pigou_game_expected_itl_seconds",
    ):
        assert {each.labels["worker"] for each in families[name].samples} == {"a", "b"}
    [state] = families["pigou_game_saturation_state"].samples
    assert state.value in (0, 1, 2)
    assert families["pigou_game_router_temperature"].samples[0].value == 0
    counts = {
        each.name: each.value
        for name in ("pigou_game_routing_cost", "pigou_game_regret_seconds",
                     "pigou_game_overlap_blocks", "pigou_game_overlap_ratio",
                     "pigou_game_decision_seconds")
        for each in families[name].samples if each.name.endswith("_count")
    }  # fmt: skip
    assert set(counts.values()) == {6.0}
    itl = {each.name: each.value for each in families["pigou_inter_token_latency_seconds"].samples}
    assert itl["pigou_inter_token_latency_seconds_count"] > 6


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(1, 5)), max_size=60))
def test_the_fast_histogram_exports_what_the_usual_one_does(
    values: list[tuple[float, int]],
) -> None:
    bounds = (0.0, 0.5, 1, 2.5, 10)
    pages = []
    for fast in (True, False):
        registry = CollectorRegistry()
        if fast:
            ours = FastHistogram("x", "help", bounds)
            registry.register(ours)
            for value, times in values:
                ours.observe(value, times)
        else:
            usual = Histogram("x", "help", buckets=bounds, registry=registry)
            for value, times in values:
                for _ in range(times):
                    usual.observe(value)
        page = text_string_to_metric_families(generate_latest(registry).decode())
        pages.append([each for each in page if not each.name.endswith("_created")])
    for mine, theirs in zip(*pages, strict=True):
        assert (mine.name, mine.type) == (theirs.name, theirs.type)
        found = [
            [(s.name, s.labels, pytest.approx(s.value)) for s in each.samples
             if not s.name.endswith("_created")]
            for each in (mine, theirs)
        ]  # fmt: skip
        assert found[0] == found[1]
