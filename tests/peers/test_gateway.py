"""The gateway in front of real vLLM servers: what they hold is known, and streams move."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
import pytest

from benchmarks.lib.servers import post_json
from pigou.config import ControlConfig
from pigou.control.prefix_index import chain
from pigou.fleet.config import AttachedWorker, WatchConfig
from pigou.fleet.serve import Serving
from pigou.fleet.supervisor import FleetSetup
from pigou.gateway.config import GatewayConfig

if TYPE_CHECKING:
    from tests.peers.conftest import VllmWorker


pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

WATCH = WatchConfig(every=0.3, timeout=1.5, failures=2)
IDS = [300 + i % 700 for i in range(200)]


@asynccontextmanager
async def gateway(*attach: str) -> AsyncIterator[tuple[Serving, str, aiohttp.ClientSession]]:
    workers = [AttachedWorker.parse(text, i) for i, text in enumerate(attach)]
    config = GatewayConfig(port=0, strict=False)
    serving = Serving(
        config, ControlConfig(policy="least-loaded"), FleetSetup(workers=workers, watch=WATCH)
    )
    try:
        await serving.start()
        async with aiohttp.ClientSession() as session:
            yield serving, f"http://127.0.0.1:{serving.port}", session
    finally:
        await serving.stop()


async def ask(session: aiohttp.ClientSession, url: str, **body: Any) -> dict[str, Any]:
    wanted = {"prompt": IDS, "max_tokens": 8, "temperature": 0, **body}
    async with session.post(url + "/v1/completions", json=wanted) as response:
        assert response.status == 200, await response.text()
        found: dict[str, Any] = await response.json()
        return found


async def stream(session: aiohttp.ClientSession, url: str, **body: Any) -> AsyncIterator[bytes]:
    wanted = {"prompt": IDS, "max_tokens": 8, "temperature": 0, "stream": True, **body}
    async with session.post(url + "/v1/completions", json=wanted) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.strip():
                yield line.strip().removeprefix(b"data: ")


def text_of(lines: list[bytes]) -> str:
    assert lines[-1] == b"[DONE]"
    chunks = [msgspec.json.decode(line) for line in lines[:-1]]
    assert all("error" not in chunk for chunk in chunks), chunks
    return "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"])


def test_the_index_knows_every_block_that_two_servers_hold(
    vllm_plain_two: list[VllmWorker],
) -> None:
    size = vllm_plain_two[0].block_size

    async def main() -> None:
        attach = [
            f"{each.url},events={each.events.endpoint},replay={each.events.replay_endpoint},topic=kv"
            for each in vllm_plain_two
        ]
        async with gateway(*attach) as (serving, url, session):
            prompts = [[300 + k, *IDS[1:]] for k in range(8)]
            await asyncio.gather(*(ask(session, url, prompt=prompt) for prompt in prompts))
            index = serving.plane_driver.plane.index
            names = list(serving.plane_driver.upstreams)
            for _ in range(100):
                held = [max(index.overlap(n, chain(p, size)) for n in names) for p in prompts]
                if held == [len(IDS) // size] * 8:
                    break
                await asyncio.sleep(0.1)
            assert held == [len(IDS) // size] * 8
            assert all(index.cache(name).event_gaps == 0 for name in names)

    asyncio.run(main())


def test_a_stream_of_a_server_that_hangs_goes_on_at_the_other(
    vllm_plain_two: list[VllmWorker],
) -> None:
    alone = post_json(
        vllm_plain_two[0].url + "/v1/completions",
        {"prompt": IDS, "max_tokens": 300, "temperature": 0, "ignore_eos": True},
    )["choices"][0]["text"]

    async def main() -> tuple[str, str]:
        async with gateway(*(each.url for each in vllm_plain_two)) as (serving, url, session):
            lines: list[bytes] = []
            async for line in stream(session, url, max_tokens=300, ignore_eos=True):
                lines.append(line)
                if len(lines) == 20:
                    (busy,) = [up for up in serving.plane_driver.upstreams.values() if up.inflight]
                    (paused,) = [w for w in vllm_plain_two if w.url == busy.worker.url]
                    paused.server.pause()
                    before = text_of([*lines, b"[DONE]"])
            return before, text_of(lines)

    try:
        before, whole = asyncio.run(main())
    finally:
        for each in vllm_plain_two:
            each.server.resume()
            each.server.wait_healthy(timeout_s=60)
    # Beyond the seam, a prompt that is computed anew may round otherwise than the first worker's
    # decode steps did, and a random model has near ties: only what is close must be the same.
    seam = len(before) + 20
    assert whole[:seam] == alone[:seam]
