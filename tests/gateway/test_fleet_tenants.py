"""Workers that know the fleet's secret are told whose a request is, by the gateway alone."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest
from tests.gateway.stub import Stub, serving
from tests.gateway.test_front import CHAT, TEXT

from pigou.gateway.auth.keys import Key, Keys, make_key
from pigou.gateway.proxy.upstream import Engine
from pigou.request import Role, Worker
from pigou.wire.fleet_secret import TENANT, FleetSecret, tenant_mark

SECRET = FleetSecret("a secret of the fleet, long enough")
PROMPT = "a prompt that is longer than one block of sixteen tokens, surely so it is"
BODIES: list[tuple[str, dict[str, Any]]] = [
    (TEXT, {"prompt": PROMPT}),
    (TEXT, {"prompt": PROMPT, "stream": True}),
    (TEXT, {"prompt": PROMPT, "cache_salt": "another"}),
    (TEXT, {"prompt": ["a", "b"], "n": 2}),
    (CHAT, {"messages": [{"role": "user", "content": PROMPT}]}),
    ("/tokenize", {"prompt": PROMPT}),
]


async def marks(*, stock: bool = False, secret: str = "", keyed: bool = True) -> set[str | None]:
    """Return the marks that workers got with requests of one tenant, who sends one as well."""
    key, line = make_key("one")
    tenant, _, digest = line.rpartition(":")
    keys = Keys([Key(tenant, bytes.fromhex(digest))]) if keyed else None
    header = {"authorization": f"Bearer {key}", TENANT: tenant_mark("other")}
    stubs = [Stub("p", Role.PREFILL, stock), Stub("d", Role.DECODE, stock)]
    async with serving(keys=keys, strict=False) as fleet:
        runners = [await stub.start() for stub in stubs]
        for stub in stubs:
            worker = Worker(stub.name, stub.url, stub.role)
            await fleet.plane_driver.up(worker, Engine(stock, "stub", 2048), secret)
        before = [len(stub.seen) for stub in stubs]
        for path, body in BODIES:
            data = await _status(fleet, path, body, header)
            assert data == 200, (path, body)
        seen = [each for stub, n in zip(stubs, before, strict=True) for each in stub.seen[n:]]
        for runner in runners:
            await runner.cleanup()
    assert len(seen) >= len(BODIES)
    return {each.headers.get(TENANT) for each in seen if each.request_id != "tokenize"}


async def _status(fleet: Any, path: str, body: dict[str, Any], header: dict[str, str]) -> int:
    async with (
        aiohttp.ClientSession() as session,
        session.post(fleet.url + path, json=body, headers=header) as response,
    ):
        await response.read()
        return response.status


async def test_every_leg_tells_the_tenant_of_the_key_and_never_what_a_client_sends() -> None:
    assert await marks(secret=SECRET.token) == {tenant_mark("one")}


@pytest.mark.parametrize("case", [{"stock": True, "secret": "key"}, {}, {"keyed": False}])
async def test_whoever_is_no_worker_of_the_fleet_is_told_nothing(case: dict[str, Any]) -> None:
    assert await marks(**case) == {None}


def test_a_mark_is_the_tenants_own_and_does_not_show_its_name() -> None:
    assert tenant_mark("a") == tenant_mark("a") != tenant_mark("b")
    assert "tenant" not in tenant_mark("tenant\r\nx: y \ud800")
