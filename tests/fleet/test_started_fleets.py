"""The laws of fleets that start their workers, over local processes and over Ray."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
from tests.fleet.harness import SLEEP, Client, running, text, until
from tests.fleet.ray_nodes import RayNodes, ray_nodes

from pigou.config import ConfigError, ControlConfig
from pigou.fleet.config import FleetError, RayConfig, WorkersConfig
from pigou.fleet.sources.local import WorkerTemplate
from pigou.placement.gang import Pack
from pigou.placement.topology import TopologyLevel

#: Prompts go to the prefill worker.
SPLIT = ControlConfig(policy="least-loaded")
on_ray = [
    pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300),
    pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray: pip install '.[ray]'"),
]  # fmt: skip
both = pytest.mark.parametrize(
    "kind", [pytest.param("local", marks=pytest.mark.slow), pytest.param("ray", marks=on_ray)]
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayNodes]:
    with ray_nodes() as nodes:
        print(f"four nodes after {nodes.start_s:.1f} s")
        yield nodes


@pytest.fixture
def ray(kind: str, request: pytest.FixtureRequest) -> RayConfig | None:
    """The cluster for `ray`; None for `local`."""
    if kind == "local":
        return None
    return RayConfig(address=request.getfixturevalue("cluster").address)


def fleet(ray: RayConfig | None, *counts: int) -> Any:
    template = WorkerTemplate(arguments=SLEEP, ray=ray)
    return running(*counts, control=SPLIT, templates=[template])


async def streams(client: Client, count: int = 6) -> list[asyncio.Task[list[dict[str, Any]]]]:
    tasks = [asyncio.create_task(client.reply(max_tokens=60)) for _ in range(count)]
    await until(client, lambda rows: sum(r["decode_requests"] for r in rows.values()) >= count)
    return tasks


def up(id: str) -> Any:
    return lambda rows: id in rows and rows[id]["state"] == "up"


@both
async def test_workers_join_flip_and_leave(kind: str, ray: RayConfig | None) -> None:
    async with fleet(ray, 1, 1, 0) as (serving, client):
        rows = await client.workers()
        assert {row["kind"] for row in rows.values()} == {kind}
        expected = text(await client.reply(max_tokens=60))
        tasks = await streams(client)
        status, _ = await client.change("POST", "/workers", {"role": "decode"})
        assert status == 202
        await until(client, up("decode-1"))
        status, _ = await client.change("POST", "/workers/decode-0/drain")
        assert status == 202
        await until(client, lambda rows: "decode-0" not in rows)
        assert [text(await task) for task in tasks] == [expected] * 6
        serving.live_fleet.add("decode", 0)
        await until(client, up("decode-2"))
        serving.live_fleet.flip("decode-2", "prefill", 0)
        await until(client, lambda rows: rows["decode-2"]["role"] == "prefill")
        assert text(await client.reply(max_tokens=60)) == expected


@both
async def test_a_killed_process_breaks_no_stream_and_is_started_again(
    kind: str, ray: RayConfig | None
) -> None:
    async with fleet(ray, 1, 2, 0) as (serving, client):
        expected = text(await client.reply(max_tokens=60))
        tasks = await streams(client)
        os.kill(await pid_of(serving, client, "decode-0"), signal.SIGKILL)
        assert [text(await task) for task in tasks] == [expected] * 6
        await until(client, lambda rows: up("decode-0")(rows) and rows["decode-0"]["restarts"])


async def pid_of(serving: Any, client: Client, id: str) -> int:
    pid = (await client.workers())[id].get("pid", 0)
    if not pid:
        provider = serving.supervisor.local
        _, pid = await provider.cluster.call(provider._bundles[id], "pids")
    return int(pid)


def ray_test(test: Any) -> Any:
    for mark in on_ray:
        test = mark(test)
    return test


@ray_test
async def test_a_gang_that_does_not_fit_ray_takes_nothing(cluster: RayNodes) -> None:
    import ray as library

    config = RayConfig(address=cluster.address)
    with pytest.raises(FleetError, match="9 workers of 1 GPUs do not fit the 4 nodes with 8"):
        async with fleet(config, 1, 8, 0):
            pass
    rack = Pack(level=TopologyLevel.RACK, required=True)
    with pytest.raises(FleetError, match="within one rack"):
        async with fleet(RayConfig(address=cluster.address, pack=rack), 1, 4, 0):
            pass
    library.init(address=cluster.address, log_to_driver=False)
    free = library.available_resources()["CPU"]
    library.shutdown()
    assert free == 8.0


@ray_test
async def test_a_killed_node_breaks_no_stream_and_its_workers_move(cluster: RayNodes) -> None:
    """Last in the file: the cluster has a node less then."""
    config = RayConfig(address=cluster.address)
    async with fleet(config, 1, 3, 0) as (_, client):
        rows = await client.workers()
        hosts = {id: row["host"] for id, row in rows.items()}
        assert len(set(hosts.values())) == 2
        assert len({row["rack"] for row in rows.values()}) == 1
        expected = text(await client.reply(max_tokens=60))
        victim = next(h for h in hosts.values() if h != "n0" and h != hosts["prefill-0"])
        moved = [id for id, host in hosts.items() if host == victim]
        tasks = await streams(client, 12)
        began = time.monotonic()
        cluster.kill(victim)
        assert [text(await task) for task in tasks] == [expected] * 12
        streamed_s = time.monotonic() - began
        while True:
            rows = await client.workers()
            if all(up(id)(rows) and rows[id]["host"] != victim for id in moved):
                break
            assert time.monotonic() - began < 120, rows
            await asyncio.sleep(0.2)
        print(f"streams whole after {streamed_s:.1f} s, workers {moved} back after "
              f"{time.monotonic() - began:.1f} s")  # fmt: skip
        assert all(rows[id]["host"] for id in moved)
        assert text(await client.reply(max_tokens=60)) == expected


def test_options_of_ray_are_refused_elsewhere() -> None:
    with pytest.raises(ConfigError, match="are for --on ray"):
        WorkersConfig(pack="rack")
    with pytest.raises(ConfigError, match="Ray chooses which"):
        WorkersConfig(on="ray", device="cuda:1")
    with pytest.raises(ConfigError, match="pack is 'row'"):
        WorkersConfig(on="ray", pack="row")
    config = WorkersConfig(on="ray", pack="required:rack", device="cuda").ray
    assert config is not None
    assert (config.pack, config.units) == (Pack(level=TopologyLevel.RACK, required=True), 1)
