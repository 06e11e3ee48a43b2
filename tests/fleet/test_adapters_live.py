"""A live gateway keeps adapters where they are loaded, and gives hot ones further copies."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tests.fleet.harness import running

import pigou.gateway.plane_driver as driver
from pigou.gateway.proxy.upstream import Upstream
from pigou.worker.adapters import UPDATING


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Options of mock workers with four adapters over two slots."""
    monkeypatch.setenv(UPDATING, "1")
    modules = []
    for name in "abcd":
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(json.dumps({"name": name}))
        modules += ["--lora-modules", f"{name}={tmp_path / name}"]
    return ("--executor", "sleep", "--sleep-base", "2000000", "--enable-lora", "--max-loras", "2",
            "--max-cpu-loras", "2", "--sleep-lora-read", "200000000", "--rehearse", "0",
            *modules)  # fmt: skip


async def loads(upstream: Upstream) -> float:
    """Return the loads that a worker counts."""
    page = (await upstream.get("/metrics", 10.0))[1].decode()
    lines = [line for line in page.splitlines() if line.startswith("pigou_lora_loads_total")]
    return sum(float(line.split()[-1]) for line in lines)


async def test_each_adapter_is_loaded_once_and_copied_when_it_is_hot(
    options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "_PLACEMENT_S", 0.5)
    async with running(0, 0, 2, arguments=options, template=None, place_adapters=True) as (
        serving, client,
    ):  # fmt: skip
        names = set()
        async with client.session.get(client.url + "/v1/models") as response:
            names = {card["id"] for card in (await response.json())["data"]}
        assert {"a", "b", "c", "d"} < names
        await asyncio.sleep(1.0)  # until the workers have told that nothing is loaded
        for _ in range(4):
            for name in "abcd":
                chunks = await client.reply(model=name, max_tokens=2)
                assert {c["model"] for c in chunks if "model" in c} == {name}
        workers = sorted(await client.workers())
        ups = serving.plane_driver.upstreams
        assert [await loads(ups[worker]) for worker in workers] == [2.0, 2.0], (
            "each adapter is loaded once, two on each worker"
        )
        # An adapter that one worker knows; requests for it make the other one learn it.
        (tmp_path / "e").mkdir()
        (tmp_path / "e" / "adapter_config.json").write_text("{}")
        rows: dict[str, Any] = await client.workers()
        body = {"lora_name": "e", "lora_path": str(tmp_path / "e")}
        status, _ = await ups[workers[0]].get("/v1/load_lora_adapter", 10.0, "POST", body)
        assert status == 200
        for _ in range(600):
            rows = await client.workers()
            if "e" in rows[workers[0]]["adapters"]:
                break
            await asyncio.sleep(0.1)
        for _ in range(40):
            await client.reply(model="e", max_tokens=1)
        for _ in range(600):
            rows = await client.workers()
            if "e" in rows[workers[1]]["adapters"]:
                return
            await asyncio.sleep(0.1)
        raise AssertionError(rows)
