"""Every bound on a body gives a 400 that names field, count and remedy; no worker sees it."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from tests.gateway.stub import Stub, serving
from tests.gateway.test_front import eventually, post
from tests.wire.hostile_bodies import CASES, TEXT, encode

from pigou.gateway import request_parsing
from pigou.gateway.auth.keys import Key, Keys, make_key
from pigou.wire.fair_turns import FairThreadPool
from pigou.wire.json_limits import SMALL


@pytest.mark.parametrize("name", CASES)
async def test_what_is_out_of_bounds_is_refused_by_name(name: str) -> None:
    path, body, field, words = CASES[name]
    async with serving(Stub("a")) as fleet:
        status, answer, _ = await post(fleet, path, encode(body))
        assert (status, answer["error"]["param"]) == (400, field), answer
        assert all(word in answer["error"]["message"] for word in words), answer
        assert not [seen for seen in fleet.stubs["a"].seen if seen.path == path]


async def test_a_tenant_with_too_many_large_bodies_gets_429_and_others_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The threads are held; what waits is of one tenant, up to its bound."""
    (one, line), (two, other) = make_key("one"), make_key("two")
    parts = [each.rpartition(":") for each in (line, other)]
    keys = Keys([Key(tenant, bytes.fromhex(digest)) for tenant, _, digest in parts])
    go, under_way, read = threading.Event(), threading.Semaphore(0), request_parsing.read

    def held(*args: Any, **fields: Any) -> Any:
        under_way.release()
        assert go.wait(60)
        return read(*args, **fields)

    monkeypatch.setattr("pigou.gateway.api.generation.read", held)
    monkeypatch.setattr(FairThreadPool.__init__, "__defaults__", (2, 2))  # threads, waiting
    body = encode({"prompt": "a", "user": "u" * SMALL, "max_tokens": 3})
    async with serving(Stub("a"), keys=keys) as fleet:

        def ask(secret: str) -> asyncio.Task[Any]:
            header = {"authorization": f"Bearer {secret}"}
            return asyncio.create_task(post(fleet, TEXT, body, header))

        first = [ask(one) for _ in range(2)]
        await asyncio.to_thread(lambda: [under_way.acquire(timeout=60) for _ in first])
        waiting = [ask(one) for _ in range(8)]
        await eventually(lambda: any(task.done() for task in waiting))
        refused = next(task for task in waiting if task.done()).result()
        assert refused[0] == 429
        served = ask(two)
        go.set()
        assert (await served)[0] == 200
        await asyncio.gather(*first, *waiting)
