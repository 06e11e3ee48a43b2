"""Routing by model: a request reaches workers of its model alone, by any of that model's names."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.fleet.harness import PROMPT, Client, attached, text, until
from tests.gateway.stub import Stub

from pigou.fleet.config import DeclaredModel, FleetError
from pigou.fleet.serve import Serving

NAMES = ("ant", "bee", "org/cat-1.5")
ALIASES = {name: tuple(f"{name}-alias-{i}" for i in range(33)) for name in NAMES}
MODELS = tuple(DeclaredModel(name=name, aliases=ALIASES[name]) for name in NAMES)
ALL = [name for model in NAMES for name in (model, *ALIASES[model])]


@asynccontextmanager
async def three(**rest: Any) -> AsyncIterator[tuple[dict[str, Stub], Serving, Client]]:
    """Run a gateway of three models, with one stub each."""
    stubs = {name: Stub(f"worker-{i}", model=name, **rest) for i, name in enumerate(NAMES)}
    async with attached(*stubs.values(), models=MODELS) as (serving, client):
        await until(client, lambda rows: all(row["state"] == "up" for row in rows.values()))
        yield stubs, serving, client


async def test_each_of_a_hundred_names_reaches_its_model_alone() -> None:
    async with three() as (stubs, _, client):
        async with client.session.get(client.url + "/v1/models") as response:
            cards = (await response.json())["data"]
        assert [card["id"] for card in cards] == ALL
        assert {card["id"]: card["root"] for card in cards}[ALIASES["bee"][7]] == "bee"
        for name in ALL:
            body = {"prompt": PROMPT, "max_tokens": 1, "model": name}
            status, reply = await client.post("/v1/completions", **body)
            root = next(model for model in NAMES if name.startswith(model))
            assert (status, reply["model"]) == (200, root)
        for name, stub in stubs.items():
            asked = [seen.body["model"] for seen in stub.seen]
            assert asked == [name] * 34, "a worker is asked by the name that it reports"


async def test_a_name_is_one_of_those_that_are_served() -> None:
    async with three() as (stubs, _, client):
        status, reply = await client.post("/v1/completions", prompt="x", model="dog")
        error = reply["error"]
        assert (status, error["code"], error["param"]) == (404, 404, "model")
        assert error["message"].startswith("The model `dog` does not exist. Valid aliases: ant, ")
        assert "82 more (GET /v1/models)" in error["message"]
        status, reply = await client.post("/v1/chat/completions", messages=[])
        assert (status, reply["error"]["param"]) == (400, "model")
        assert reply["error"]["message"].startswith("model is missing; it must be one of ant, ")
        status, _ = await client.post("/v1/completions", prompt="x", model=7)
        assert status == 400
        async with client.session.get(client.url + "/v1/models/dog") as response:
            assert response.status == 404
        assert not any(stub.seen for stub in stubs.values())


async def test_blocks_of_one_model_are_no_hit_for_another() -> None:
    async with three() as (_, serving, client):
        for name in ("ant", "ant", "bee"):
            await client.reply(prompt=list(range(5, 105)), model=name, max_tokens=2)
        drivers = serving.supervisor.models
        planes = [drivers[name].plane for name in NAMES]
        ids = [set(drivers[name].upstreams) for name in NAMES]
        assert ids == [{"worker-0"}, {"worker-1"}, {"worker-2"}]
        ant, bee, _ = (list(plane.router.ledger.latest()) for plane in planes)
        assert [int(why.cached[why.chosen]) for why in ant] == [96, 0], "newest first"
        assert [int(why.cached[why.chosen]) for why in bee] == [0]


async def test_an_alias_shares_the_blocks_of_its_model() -> None:
    async with three() as (_, serving, client):
        for name in ("ant", ALIASES["ant"][3]):
            body = {"prompt": list(range(5, 105)), "model": name, "cache_salt": "mine"}
            await client.reply(**body, max_tokens=2)
        plane = serving.supervisor.models["ant"].plane
        assert [int(why.cached[why.chosen]) for why in plane.router.ledger.latest()] == [96, 0]


async def test_a_model_without_workers_waits_and_harms_no_other() -> None:
    async with three() as (stubs, serving, client):
        drivers = serving.supervisor.models
        await drivers["bee"].down("worker-1")
        waiting = asyncio.create_task(
            client.post("/v1/completions", prompt="x", model="bee", max_tokens=2)
        )
        async with asyncio.timeout(60):
            while drivers["bee"].queued != 1:
                await asyncio.sleep(0.01)
        status, _ = await client.post("/v1/completions", prompt="x", model="ant", max_tokens=2)
        assert status == 200
        async with client.session.get(client.url + "/health") as response:
            body = await response.json()
        assert response.status == 200
        assert body["models"]["bee"] == "no decode worker is up"
        assert body["status"] == "degraded"
        assert body["models"]["ant"] == "ok"
        assert not waiting.done()
        assert drivers["bee"].queued == 1
        waiting.cancel()
        assert len(stubs["bee"].seen) == 0


async def test_what_is_shown_has_the_model() -> None:
    async with three() as (_, _serving, client):
        for name in NAMES:
            await client.post("/v1/completions", prompt="x", model=name, max_tokens=2)
        rows = await client.workers()
        assert [row["model"] for row in rows.values()] == list(NAMES)
        assert [row["pool"] for row in rows.values()] == [f"both.{n}.attached" for n in NAMES]
        async with client.session.get(client.url + "/workers") as response:
            models = (await response.json())["models"]
        assert list(models) == list(NAMES)
        assert models["ant"]["aliases"] == list(ALIASES["ant"])
        assert models["ant"]["game"]["policy"]
        async with client.session.get(client.url + "/decisions") as response:
            shown = (await response.json())["decisions"]
        assert [entry["decode"] for entry in shown] == ["worker-2", "worker-1", "worker-0"]
        async with client.session.get(client.url + "/decisions/" + shown[1]["id"]) as response:
            assert (await response.json())["decode"] == "worker-1"
        async with client.session.get(client.url + "/metrics") as response:
            page = (await response.text()).splitlines()
    for name in NAMES:
        label = f'model_name="{name}"'
        assert f'pigou_requests_total{{{label},route="/v1/completions",status="200"}} 1.0' in page
        assert f'pigou_generation_tokens_total{{{label},tenant=""}} 2.0' in page
        assert sum(line.startswith("pigou_worker_up{") and label in line for line in page) == 1
    heads = [line for line in page if line.startswith("# TYPE")]
    assert len(heads) == len(set(heads)), "each family comes once"
    assert sum(line.startswith("pigou_requests_inflight") for line in page) == 1


async def test_one_declared_model_has_its_aliases_and_metrics() -> None:
    models = (DeclaredModel(name="ant", aliases=("a",)),)
    async with attached(Stub("one", model="ant"), models=models) as (_, client):
        for body in ({}, {"model": "a"}, {"model": "ant"}):
            status, _ = await client.post("/v1/completions", prompt="x", max_tokens=2, **body)
            assert status == 200
        status, _ = await client.post("/v1/completions", prompt="x", model="dog")
        assert status == 404
        async with client.session.get(client.url + "/metrics") as response:
            page = (await response.text()).splitlines()
    assert 'pigou_generation_tokens_total{model_name="ant",tenant=""} 6.0' in page
    assert 'pigou_worker_up{model_name="ant",role="both",worker="one"} 1.0' in page


async def test_a_server_of_an_undeclared_model_is_refused() -> None:
    models = (DeclaredModel(name="ant"), DeclaredModel(name="bee"))
    with pytest.raises(FleetError, match="the server serves 'cow', and this gateway has ant, bee"):
        async with attached(Stub("a", model="cow"), models=models):
            pass


async def test_stock_servers_of_several_models_stream(capfd: pytest.CaptureFixture[str]) -> None:
    async with three(stock=True) as (_, _serving, client):
        chunks = await client.reply(model=ALIASES["bee"][0], max_tokens=6, stop="zzz")
        assert text(chunks) == " t0 t1 t2é t5"
        assert chunks[0]["model"] == "bee"
    capfd.readouterr()
