"""A gateway under twice its capacity: what is admitted finishes, the rest is refused politely."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable

import aiohttp
import psutil
import pytest
from tests.e2e.fleet import Fleet

SLOTS = 8
QUEUE = 16
TOKENS = 20
STEP = 0.02
#: Requests a second that the fleet can finish at most.
CAPACITY = SLOTS / (TOKENS * STEP)


async def ask(session: aiohttp.ClientSession, url: str, number: int) -> tuple[int, float]:
    """Return status and seconds of one stream; it must be whole, or refused as documented."""
    body = {"prompt": [6 + number % 900] * 40, "max_tokens": TOKENS, "ignore_eos": True,
            "stream": True, "return_token_ids": True}  # fmt: skip
    began = time.monotonic()
    async with session.post(url + "/v1/completions", json=body) as response:
        data = await response.read()
        if response.status == 200:
            assert data.endswith(b"data: [DONE]\n\n"), data[-300:]
            assert b'"error"' not in data
            assert data.count(b'"token_ids":[') >= 1
        else:
            assert response.status == 503, data
            assert int(response.headers["retry-after"]) >= 1
            error = (await response.json())["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["code"] == 503
    return response.status, time.monotonic() - began


async def flood(url: str, rate: float, seconds: float) -> list[tuple[int, float]]:
    """Send requests at a fixed rate, whatever becomes of them."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        began, tasks = time.monotonic(), []
        for number in range(int(rate * seconds)):
            await asyncio.sleep(max(0.0, began + number / rate - time.monotonic()))
            tasks.append(asyncio.create_task(ask(session, url, number)))
        return await asyncio.gather(*tasks)


@pytest.mark.parametrize(
    "seconds", [3, pytest.param(60, marks=[pytest.mark.slow, pytest.mark.timeout(240)])]
)
def test_under_twice_its_capacity_a_gateway_sheds_and_what_is_admitted_finishes(
    start_fleet: Callable[..., Fleet], seconds: float
) -> None:
    fleet = start_fleet(
        ["both-0"], "--executor", "sleep", "--repeat", "1", "--blocks", "512",
        "--sleep-base", str(int(STEP * 1e9)), "--sleep-per-seq", "0",
        control={"max_inflight": SLOTS, "max_queued": QUEUE},
    )  # fmt: skip
    gateway = psutil.Process(fleet.process.pid)
    asyncio.run(flood(fleet.url, CAPACITY, 1))
    memory, files = gateway.memory_info().rss, gateway.num_fds()
    replies = asyncio.run(flood(fleet.url, 2 * CAPACITY, seconds))
    counts = Counter(status for status, _ in replies)
    slowest = max(took for status, took in replies if status == 200)
    refused = max(took for status, took in replies if status == 503)
    print(f"{seconds} s at {2 * CAPACITY:.0f}/s: {dict(counts)}, slowest {slowest:.1f} s, "
          f"slowest refusal {refused:.2f} s")  # fmt: skip
    assert set(counts) == {200, 503}
    assert counts[200] > QUEUE + SLOTS, "it went on while it refused"
    assert counts[503] == fleet.metric("pigou_requests_shed_total")
    # Whoever is admitted waits for a queue of bounded length, and no longer.
    assert slowest < 30 * (QUEUE + SLOTS) / CAPACITY
    fleet.settle()
    assert gateway.memory_info().rss < memory + 64 * 2**20
    fleet.wait(lambda _: gateway.num_fds() < files + 32)
    assert fleet.stream(prompt=[7] * 40, max_tokens=4).told
    fleet.stop()
