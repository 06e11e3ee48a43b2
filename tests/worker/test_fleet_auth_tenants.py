"""A worker compiles grammars in turn by tenant, as a gateway with the fleet's secret tells it."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from aiohttp import ClientSession, web

from pigou.request import Grammar
from pigou.wire.fleet_secret import TENANT, FleetSecret
from pigou.wire.openai_requests import decode_generation
from pigou.worker.http.fleet_auth import fleet_guard, fleet_tenant
from pigou.worker.http.served_model import ServedModel
from pigou.worker.http.structured_output_pool import OutputConstraints

SECRET = FleetSecret("a secret of the fleet, long enough")


class Recorder:
    """Compiles nothing; notes whose turn each grammar takes."""

    def __init__(self) -> None:
        self.tenants: list[str] = []

    async def prepare(
        self, grammar: Grammar, tenant: str, count: int, output: Any = ()
    ) -> list[Any]:
        self.tenants.append(tenant)
        return [None] * count

    def warm_up(self) -> None: ...

    def close(self) -> None: ...


def turns(tenant: str, *salts: str | None) -> list[str]:
    source = Recorder()
    shapes = OutputConstraints(source, cast(ServedModel, None), flexible=False)

    async def main() -> None:
        for salt in salts:
            said = f',"cache_salt":"{salt}"' if salt else ""
            body = f'{{"prompt":"a","structured_outputs":{{"regex":"a"}}{said}}}'
            await shapes.shape(decode_generation(body.encode()), 1, (), tenant)

    asyncio.run(main())
    return source.tenants


def test_a_tenant_gets_no_further_turn_with_another_salt() -> None:
    assert turns("mark", "one", "two", None) == ["mark"] * 3


def test_without_a_gateways_word_the_salt_tells() -> None:
    assert turns("", "one", "two", None) == ["one", "two", ""]


@pytest.mark.parametrize(
    ("secret", "bearer", "told"),
    [(SECRET, SECRET.token, "mark"), (None, SECRET.token, ""), (SECRET, "wrong", None)],
)
async def test_the_tenant_counts_with_the_secret_alone(
    secret: FleetSecret | None, bearer: str, told: str | None
) -> None:
    async def tell(_: web.Request) -> web.Response:
        return web.Response(text=fleet_tenant())

    app = web.Application(middlewares=[fleet_guard(secret)])
    app.router.add_get("/", tell)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    headers = {"authorization": f"Bearer {bearer}", TENANT: "mark"}
    try:
        async with (
            ClientSession(headers=headers) as session,
            session.get(f"http://127.0.0.1:{runner.addresses[0][1]}/") as response,
        ):
            assert (await response.text() if response.status == 200 else None) == told
    finally:
        await runner.cleanup()
