"""A fleet of real worker processes without a model: they sleep by a law and make tokens up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from tests.gateway.stub import Stub
from tests.lib.forked_python import Forks
from tests.lib.local_workers import local_workers

from pigou.config import ControlConfig
from pigou.control.degradation import DegradedMode
from pigou.control.planner.config import PlannerConfig
from pigou.fleet.config import AttachedWorker, DeclaredModel, LocalWorker, WatchConfig
from pigou.fleet.serve import Serving
from pigou.fleet.sources.local import WorkerTemplate
from pigou.fleet.supervisor import FleetSetup
from pigou.gateway.config import GatewayConfig

#: Looks often, so that tests wait for little.
WATCH = WatchConfig(
    every=0.2, timeout=1.0, failures=2, hang=20.0, start=120.0, drain=2.0, min_backoff_s=0.1
)
SLEEP = ("--executor", "sleep", "--sleep-base", "20000000", "--repeat", "1", "--rehearse", "0")
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

    async def change(
        self, method: str, path: str, body: Any = None, **options: Any
    ) -> tuple[int, dict[str, Any]]:
        """Change the fleet; return status and answer."""
        url = self.url + path
        async with self.session.request(method, url, json=body, **options) as response:
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
    attach: tuple[LocalWorker | AttachedWorker, ...] = (),
    watch: WatchConfig = WATCH,
    control: ControlConfig | None = None,
    arguments: tuple[str, ...] = SLEEP,
    template: tuple[str, ...] | None = SLEEP,
    planner: PlannerConfig | None = None,
    journal: Path | None = None,
    models: tuple[DeclaredModel, ...] = (),
    templates: Sequence[WorkerTemplate] = (),
    prices: str = "",
    token_endpoint: bool = True,
    place_adapters: bool = False,
    degrade: tuple[DegradedMode, ...] = (),
) -> AsyncIterator[tuple[Serving, Client]]:
    """Run a fleet of (prefill, decode, both) workers behind a gateway.

    Further workers get the arguments of `template`; None starts none.
    """
    workers: list[LocalWorker | AttachedWorker] = [
        *local_workers(*counts, arguments, ["cpu"]), *attach
    ]  # fmt: skip
    gateway = GatewayConfig(
        port=0, strict=not attach, journal=None if journal is None else str(journal),
        token_endpoint=token_endpoint, place_adapters=place_adapters, degrade=degrade,
        prices=prices, gpu="cpu" if prices else "",
        priced_model="llama-3.1-8b" if prices else "",
    )  # fmt: skip
    if template is not None and not templates:
        templates = [WorkerTemplate(arguments=template)]
    serving = Serving(
        gateway, control or ControlConfig(),
        FleetSetup(workers=workers, watch=watch, templates=templates, models=models, forks=Forks()),
        planner,
    )  # fmt: skip
    try:
        await serving.start()
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=60)
        ) as session:
            yield serving, Client(f"http://127.0.0.1:{serving.port}", session)
    finally:
        await serving.stop()


@asynccontextmanager
async def attached(
    *stubs: Stub, watch: WatchConfig = WATCH, template: tuple[str, ...] | None = None, **rest: Any
) -> AsyncIterator[tuple[Serving, Client]]:
    runners = [await stub.start() for stub in stubs]
    specs = tuple(AttachedWorker(id=stub.name, url=stub.url, role=stub.role) for stub in stubs)
    try:
        async with running(0, 0, 0, attach=specs, watch=watch, template=template, **rest) as found:
            yield found
    finally:
        for runner in runners:
            await runner.cleanup()


async def until(client: Client, law: Any) -> dict[str, dict[str, Any]]:
    for _ in range(1200):
        rows = await client.workers()
        if law(rows):
            return rows
        await asyncio.sleep(0.05)
    raise AssertionError(f"it never held: {rows}")
