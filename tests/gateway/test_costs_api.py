"""`/costs`: an administrator sees all, a tenant its own, nobody anything without prices."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest
from tests.gateway.stub import Fleet, Stub, serving

from pigou.config import ControlConfig
from pigou.cost.cost_meter import CostMeter, MeteredControlPlane
from pigou.cost.usage import WorkerRate
from pigou.gateway.auth.keys import Key, Keys, make_key
from pigou.request import Role

RATE = WorkerRate(1e-3, weight_bytes=16e9, kv_bytes=131_072.0)
PATH, BODY = "/v1/completions", {"prompt": "a prompt", "max_tokens": 4, "stream": True}


async def fetch(fleet: Fleet, path: str, key: str = "", **body: Any) -> tuple[int, Any, str]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    method = "POST" if body else "GET"
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.request(method, fleet.url + path, json=body or None) as response,
    ):
        text = await response.text()
        data = await response.json() if response.content_type == "application/json" else text
        return response.status, data, response.headers.get("x-pigou-decision", "")


def stubs() -> list[Stub]:
    return [Stub("p", Role.PREFILL), Stub("d", Role.DECODE)]


async def test_a_tenant_sees_its_own_usage_and_an_administrator_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.gateway.stub.ControlPlane", metered)
    keys, secrets = [], {}
    for tenant in ("one", "two", "boss"):
        secrets[tenant], line = make_key(tenant)
        digest = bytes.fromhex(line.rpartition(":")[2])
        keys.append(Key(tenant, digest, admin=tenant == "boss"))
    async with serving(*stubs(), keys=Keys(keys)) as fleet:
        ids = {t: (await fetch(fleet, PATH, secrets[t], **BODY))[2] for t in ("one", "two")}
        await fleet.settle()
        _, own, _ = await fetch(fleet, "/costs", secrets["one"])
        _, all_, _ = await fetch(fleet, "/costs", secrets["boss"])
        status, bill, _ = await fetch(fleet, f"/costs/{ids['one']}", secrets["one"])
        other = await fetch(fleet, f"/costs/{ids['two']}", secrets["one"])
        _, page, _ = await fetch(fleet, "/metrics", secrets["boss"])
        _, mine, _ = await fetch(fleet, "/metrics", secrets["one"])
    assert own.keys() == {"tenant", "usages"}
    assert [row["tenant"] for row in own["usages"]] == ["one"]
    assert [row["tenant"] for row in all_["usages"]] == ["one", "two"]
    allocated = sum(row["allocated_usd"] for row in all_["usages"])
    assert allocated == pytest.approx(all_["usd"], rel=1e-3)
    assert all_["usages"][0]["output_tokens"] == 4
    assert (status, bill["tenant"]) == (200, "one")
    assert other[0] == 404
    assert 'pigou_cost_usd_total{class="default"' in page
    assert "pigou_cost_fleet_usd_total" in page
    assert 'tenant="two"' not in mine
    assert "pigou_cost_fleet_usd_total" not in mine


async def test_without_prices_costs_say_how_to_have_them() -> None:
    async with serving(*stubs()) as fleet:
        status, error, _ = await fetch(fleet, "/costs")
    assert status == 404
    assert "--prices" in error["error"]["message"]


def metered(config: ControlConfig) -> MeteredControlPlane:
    return MeteredControlPlane(config, CostMeter(lambda _: RATE))


async def test_a_budget_of_price_is_charged_what_the_bills_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.gateway.stub.ControlPlane", metered)
    workers = stubs()
    workers[1].script.delay_s = 0.02
    async with serving(*workers, prices="default", key_budgets=("day.price=1e-6",)) as fleet:
        id_ = (await fetch(fleet, PATH, **BODY))[2]
        await fleet.settle()
        status, error, _ = await fetch(fleet, PATH, **BODY)
        _, bill, _ = await fetch(fleet, f"/costs/{id_}")
    assert status == 429
    assert error["error"]["budget"]["name"] == "day.price"
    assert error["error"]["budget"]["used"] == pytest.approx(bill["usage_usd"], abs=1e-6)
    assert bill["usage_usd"] > 5e-5
