"""A fleet of real worker processes without a model: they sleep by a law and make tokens up."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from pigou.config import ControlConfig
from pigou.fleet.config import AttachedWorker, LocalWorker, WatchConfig
from pigou.fleet.local_workers import WorkerTemplate, local_workers
from pigou.fleet.serve import Serving
from pigou.gateway.config import GatewayConfig

#: Looks often, so that tests wait for little.
WATCH = WatchConfig(
    every=0.2, timeout=1.0, failures=2, hang=20.0, start=120.0, drain=2.0, min_backoff_s=0.1
)
SLEEP = ("--executor", "sleep", "--sleep-base", "20000000", "--repeat", "1")
PROMPT = "A prompt of some length, so that there is more than one block of sixteen to transfer."


class Client:
    """Asks a gateway."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self.session = session

    async def workers(self) -> dict[str, dict[str, Any]]:
        async with self.session.get(self.url + "/workers") as response:
            return {row["id"]: row for row in (await response.json())["workers"]}

    async def post(self, path: str, **body: Any) -> tuple[int, Any]:
        async with self.session.post(self.url + path, json=body) as response:
            return response.status, await response.json()

    async def stream(self, **body: Any) -> AsyncIterator[dict[str, Any]]:
        """Yield the chunks of a completion, then `{}` for the end."""
        wanted = {"prompt": PROMPT, "stream": True, "max_tokens": 24, "ignore_eos": True, **body}
        async with self.session.post(self.url + "/v1/completions", json=wanted) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                text = line.decode().strip().removeprefix("data: ")
                if text == "[DONE]":
                    yield {}
                elif text:
                    yield json.loads(text)

    async def reply(self, **body: Any) -> list[dict[str, Any]]:
        return [chunk async for chunk in self.stream(**body)]


def text(chunks: list[dict[str, Any]]) -> str:
    assert chunks[-1] == {}, "the stream broke off"
    assert not any("error" in chunk for chunk in chunks), chunks
    return "".join(c["choices"][0]["text"] for c in chunks if c.get("choices"))


@asynccontextmanager
async def running(
    *counts: int,
    attach: tuple[AttachedWorker, ...] = (),
    watch: WatchConfig = WATCH,
    control: ControlConfig | None = None,
    arguments: tuple[str, ...] = SLEEP,
) -> AsyncIterator[tuple[Serving, Client]]:
    """Run a fleet of (prefill, decode, both) workers behind a gateway."""
    workers: list[LocalWorker | AttachedWorker] = [
        *local_workers(*counts, arguments, ["cpu"]), *attach
    ]  # fmt: skip
    gateway = GatewayConfig(port=0, strict=not attach)
    serving = Serving(
        gateway, control or ControlConfig(), workers, watch,
        template=WorkerTemplate(arguments=arguments),
    )  # fmt: skip
    try:
        await serving.start()
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=60)
        ) as session:
            yield serving, Client(f"http://127.0.0.1:{serving.port}", session)
    finally:
        await serving.stop()
