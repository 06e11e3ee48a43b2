"""All names that a server lists are served: aliases by any, adapters by those that list them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web
from tests.fleet.harness import PROMPT, Client, attached, until
from tests.gateway.stub import Stub

from pigou.fleet.config import DeclaredModel, FleetError

IDS = list(range(5, 105))


def card(name: str, parent: str | None = "stub", root: str | None = None) -> dict[str, Any]:
    return {"id": name, "owned_by": "vllm", "parent": parent, "root": root or f"/lora/{name}"}


def alias(name: str) -> dict[str, Any]:
    return card(name, parent=None, root="stub")


def server(name: str, *cards: dict[str, Any], **rest: Any) -> Stub:
    return Stub(name, stock=True, listed=[*cards, alias("spare")], **rest)


async def ask(client: Client, model: str | None, **body: Any) -> tuple[int, Any]:
    named = {} if model is None else {"model": model}
    wanted = {"prompt": PROMPT, "max_tokens": 2, **named, **body}
    return await client.post("/v1/completions", **wanted)


async def names(client: Client) -> list[str]:
    async with client.session.get(client.url + "/v1/models") as response:
        return [card["id"] for card in (await response.json())["data"]]


async def listed(client: Client, name: str, present: bool = True) -> None:
    """Wait until the gateway has read again what its servers list."""
    async with asyncio.timeout(60):
        while (name in await names(client)) is not present:
            await asyncio.sleep(0.05)


async def test_the_list_has_every_name_with_its_root_and_parent() -> None:
    a, b = server("a", alias("m"), card("sql")), server("b", card("chat"), card("sql"))
    async with (
        attached(a, b) as (_, client),
        client.session.get(client.url + "/v1/models") as response,
    ):
        cards = {card["id"]: card for card in (await response.json())["data"]}
        shown = {name: (card["root"], card["parent"]) for name, card in cards.items()}
        assert shown == {
            "stub": ("stub", None), "m": ("stub", None), "spare": ("stub", None),
            "sql": ("/lora/sql", "stub"), "chat": ("/lora/chat", "stub"),
        }  # fmt: skip
        assert {card["max_model_len"] for card in cards.values()} == {2048}
        async with client.session.get(client.url + "/v1/models/chat") as one:
            assert await one.json() == cards["chat"]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_adapter_goes_to_servers_that_list_it_and_an_alias_to_all(stream: bool) -> None:
    a, b, c = server("a", card("sql")), server("b", alias("m")), server("c", card("chat"))
    async with attached(a, b, c) as (_, client):
        for stub, model in ((a, "sql"), (c, "chat")):
            for _ in range(6):
                if stream:
                    assert (await client.reply(model=model, max_tokens=2))[-1] == {}
                else:
                    assert (await ask(client, model))[0] == 200
            assert [seen.body["model"] for seen in stub.seen] == [model] * 6
        assert b.seen == []
        replies = await asyncio.gather(*(ask(client, "m") for _ in range(12)))
        assert [status for status, _ in replies] == [200] * 12
        sent = {stub.name: {seen.body["model"] for seen in stub.seen[-2:]} for stub in (a, b, c)}
        assert sent == {"a": {"stub"}, "b": {"m"}, "c": {"stub"}}, "by a name that it knows"
        status, body = await ask(client, "nobody")
        assert (status, body["error"]["param"]) == (404, "model")
        assert "sql" in body["error"]["message"]


async def test_blocks_of_an_adapter_are_no_hit_for_another_and_aliases_share_them() -> None:
    async with attached(server("a", card("sql"), card("chat"), alias("m"))) as (serving, client):
        for name in ("stub", "sql", "chat", "sql", "m"):
            assert (await ask(client, name, prompt=IDS, cache_salt="mine"))[0] == 200
        latest = list(serving.plane_driver.plane.router.ledger.latest())[::-1]
        assert [int(why.cached[why.chosen]) for why in latest] == [0, 0, 0, 96, 96]


async def test_an_adapter_that_is_loaded_or_unloaded_while_a_server_runs_is_noticed() -> None:
    a, b = server("a"), server("b")
    async with attached(a, b) as (_, client):
        assert (await ask(client, "late"))[0] == 404
        a.listed.append(card("late"))
        b.listed.append(card("late"))
        await listed(client, "late")
        await until(client, lambda rows: all(row["adapters"] == ["late"] for row in rows.values()))
        a.listed.pop()  # and nobody has told the gateway yet
        replies = await asyncio.gather(*(ask(client, "late") for _ in range(6)))
        assert [status for status, _ in replies] == [200] * 6
        b.listed.pop()
        assert (await ask(client, "late"))[0] == 404
        await listed(client, "late", present=False)
        assert (await ask(client, "stub"))[0] == 200


async def test_a_server_of_several_names_joins_the_declared_one_and_its_adapters_follow() -> None:
    a = server("a", alias("ant"), card("sql"))
    b = Stub("b", model="bee")
    models = tuple(DeclaredModel(name=name, aliases=()) for name in ("ant", "bee"))
    async with attached(a, b, models=models) as (_, client):
        await until(client, lambda rows: all(row["state"] == "up" for row in rows.values()))
        assert await names(client) == ["ant", "stub", "spare", "sql", "bee"]
        for asked, sent in (("ant", "ant"), ("stub", "ant"), ("sql", "sql")):
            assert (await ask(client, asked))[0] == 200
            assert a.seen[-1].body["model"] == sent
        assert b.seen == []


async def test_a_server_that_shares_no_name_with_the_others_is_refused_at_the_start() -> None:
    with pytest.raises(FleetError, match=r"different models .*--model-pool"):
        async with attached(server("a"), Stub("b", model="other", stock=True)):
            pass


async def test_servers_that_share_a_name_are_one_model_each_asked_by_its_own_name() -> None:
    a, b = server("a"), Stub("b", model="spare", stock=True)
    async with attached(a, b) as (_, client):
        replies = await asyncio.gather(*(ask(client, "stub") for _ in range(6)))
        assert [status for status, _ in replies] == [200] * 6
        assert {seen.body["model"] for seen in a.seen} == {"stub"}
        assert {seen.body["model"] for seen in b.seen} == {"spare"}


async def test_usage_and_metrics_are_by_the_name_that_was_asked_for() -> None:
    async with attached(server("a", card("sql")), prices="cpu=1") as (_, client):
        for name in ("sql", "stub"):
            assert (await ask(client, name))[0] == 200
        async with client.session.get(client.url + "/metrics") as response:
            page = await response.text()
        for name in ("sql", "stub"):
            assert f'gen_ai_request_model="{name}",gen_ai_response_model="{name}"' in page
        async with client.session.get(client.url + "/costs") as response:
            costs = await response.text()
        assert '"sql"' in costs
        assert '"stub"' in costs


async def test_other_routes_reach_a_server_that_lists_the_name() -> None:
    async def embed(request: web.Request) -> web.Response:
        return web.json_response({"by": (await request.json())["model"]})

    routes = {"/v1/embeddings": embed}
    a, b = server("a", card("e5", None), routes=routes), server("b", routes=routes)
    async with attached(a, b) as (serving, client):
        for _ in range(4):
            assert await client.post("/v1/embeddings", model="e5", input="a") == (200, {"by": "e5"})
        assert not serving.plane_driver.plane.queue
