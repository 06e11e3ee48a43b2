"""Laws of `deadline_ms` at the gateway: whoever goes by it gets it, and nobody ignores it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from tests.gateway.stub import Fleet, Stub, serving
from tests.gateway.test_front import TEXT, post

from pigou.config import ControlConfig
from pigou.request import Role

EDF: dict[str, Any] = {"order": "edf"}


def tell(fleet: Fleet, *workers: str) -> None:
    """Have workers go by deadlines, as those that are started with `--order edf` say."""
    for name in workers:
        upstream = fleet.plane_driver.upstreams[name]
        upstream.engine = replace(upstream.engine, deadlines=True)


@pytest.mark.parametrize("admission", [EDF, {"order": "fair", "within": "edf"}])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stock", [False, True])
async def test_a_deadline_orders_at_the_gateway_and_spares_workers_of_another_order(
    admission: dict[str, Any], stream: bool, stock: bool
) -> None:
    stubs = Stub("p", Role.PREFILL, stock), Stub("d", Role.DECODE, stock)
    async with serving(
        *stubs, control=ControlConfig(policy="least-loaded", admission=admission)
    ) as fleet:
        body = {"prompt": "x" * 99, "deadline_ms": 5000, "stream": stream, "max_tokens": 4}
        async with (
            aiohttp.ClientSession() as session,
            session.post(fleet.url + TEXT, json=body) as response,
        ):
            assert response.status == 200
            await response.read()
        for stub in stubs:
            assert ["deadline_ms" in seen.body for seen in stub.seen] == [False]


async def test_a_worker_that_goes_by_deadlines_is_sent_what_is_left_of_one() -> None:
    for admission in (EDF, {"order": "fcfs"}):
        stub = Stub("a")
        async with serving(
            stub, control=ControlConfig(policy="least-loaded", admission=admission)
        ) as fleet:
            tell(fleet, "a")
            assert (await post(fleet, TEXT, {"prompt": "x", "deadline_ms": 5000}))[0] == 200
            assert 1000 < stub.seen[0].body["deadline_ms"] <= 5000


async def test_a_deadline_that_nobody_goes_by_is_refused_with_the_option_that_does() -> None:
    async with serving(Stub("a"), Stub("b")) as fleet:
        body = {"prompt": "x", "deadline_ms": 5000}
        status, answer, _ = await post(fleet, TEXT, body)
        assert (status, answer["error"]["param"]) == (400, "deadline_ms")
        assert "deadline_ms is 5000" in answer["error"]["message"]
        assert "--admission edf" in answer["error"]["message"]
        tell(fleet, "b")
        assert (await post(fleet, TEXT, body))[0] == 200
