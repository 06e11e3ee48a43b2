"""A worker that registers itself: as what, and which orders it takes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import uuid4

import msgspec
import pytest

from pigou.config import ConfigError
from pigou.fleet.registry.entry import Topology, WorkerEntry
from pigou.fleet.registry.registration import RegistrationConfig, WorkerRegistrar, default_id
from pigou.fleet.registry.registry import Registry, open_registry
from pigou.request import Role

ABOUT = {
    "incarnation": "incarnation-7", "url": "http://0.0.0.0:8100", "model": "tiny",
    "release": "r1", "role": "decode",
    "kv_layout": "tcp:abc", "kv_transfer": "tcp", "kv_events": "tcp://0.0.0.0:5557",
    "kv_replay": "tcp://127.0.0.1:5558", "deployment_version": "v2",
    "location": {"host": "h1", "rack": "r0", "zone": "z1"},
}  # fmt: skip


def run(
    work: Callable[[WorkerRegistrar, Registry, list[str]], Awaitable[None]], **options: Any
) -> None:
    """Run a registrar over a registry of its own; `stopped` gets a word for each stop."""

    async def main() -> None:
        url = f"memory://{uuid4().hex}"
        config = RegistrationConfig(registry=url, lease=1.0, **options)
        registrar, stopped = WorkerRegistrar(config, None, gpus=4, tp=2), []
        await registrar.ready(ABOUT, lambda: stopped.append("stop"))
        try:
            await work(registrar, open_registry(url), stopped)
        finally:
            await registrar.leave()

    asyncio.run(main())


async def entry_of(registry: Registry, law: Callable[[WorkerEntry], bool]) -> WorkerEntry:
    async with asyncio.timeout(60):
        while True:
            for own in (await registry.relist()).entries:
                if law(own):
                    return own
            await asyncio.sleep(0.01)


def test_a_worker_is_registered_as_what_it_says_and_where_others_reach_it() -> None:
    async def work(registrar: WorkerRegistrar, registry: Registry, _: list[str]) -> None:
        own = await entry_of(registry, lambda _: True)
        assert own.identity == ("w7", ABOUT["incarnation"])
        assert (own.role, own.model, own.version, own.ttl_s) == (Role.DECODE, "tiny", "v2", 1.0)
        assert (own.url, own.kv_address) == ("http://10.0.0.7:8100", "10.0.0.7")
        assert (own.kv_events, own.kv_replay) == ("tcp://10.0.0.7:5557", "tcp://127.0.0.1:5558")
        assert (own.shape.tp, own.shape.kv_layout) == (2, "tcp:abc")
        assert own.topology == Topology(
            host="h7", rack="r1", zone="z1", gpus=4, labels={"nic": "ib0"}
        )

    run(work, worker_id="w7", advertise="10.0.0.7", label=("host=h7", "rack=r1", "nic=ib0"))


def test_it_says_when_it_drains_and_is_gone_when_it_leaves() -> None:
    async def work(registrar: WorkerRegistrar, registry: Registry, stopped: list[str]) -> None:
        await entry_of(registry, lambda _: True)
        await registrar.draining()
        own = await entry_of(registry, lambda own: own.draining)
        assert own.epoch == 1
        await registrar.draining()
        await registrar.leave()
        assert (await registry.relist()).entries == ()
        assert stopped == []

    run(work)


def test_that_it_drains_outlasts_a_change_of_its_role_in_the_same_epoch() -> None:
    async def work(registrar: WorkerRegistrar, registry: Registry, _: list[str]) -> None:
        own = await entry_of(registry, lambda _: True)
        await registry.update(msgspec.structs.replace(own, epoch=1, role=Role.PREFILL))
        await registrar.draining()
        last = await entry_of(registry, lambda own: own.draining)
        assert (last.role, last.epoch) == (Role.PREFILL, 2)

    run(work)


def test_a_worker_that_the_fleet_lets_go_stops() -> None:
    async def work(_: WorkerRegistrar, registry: Registry, stopped: list[str]) -> None:
        own = await entry_of(registry, lambda _: True)
        await registry.update(msgspec.structs.replace(own, epoch=1, draining=True))
        async with asyncio.timeout(60):
            while not stopped:
                await asyncio.sleep(0.01)

    run(work)


def test_names_differ_by_host_and_process() -> None:
    assert default_id("node-1.example", "0123456789ab") == "node-1-01234567"
    assert default_id("h", "a" * 32) != default_id("h", "b" * 32)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"worker_id": "w0"}, "worker_id"), ({"label": ("rack=r1",)}, "label"),
        ({"lease": 30.0}, "lease"), ({"registry": "memory://x", "lease": 0.5}, "lease"),
        ({"registry": "memory://x", "label": ("rack",)}, "NAME=VALUE"),
        ({"registry": "memory://x", "label": ("gpus=many",)}, "gpus"),
    ],
)  # fmt: skip
def test_an_option_is_honoured_or_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        RegistrationConfig(**options)


def test_a_name_that_is_none_is_refused_with_its_reason() -> None:
    async def main() -> None:
        config = RegistrationConfig(registry=f"memory://{uuid4().hex}", worker_id="a b")
        registrar = WorkerRegistrar(config, None)
        with pytest.raises(ConfigError, match="worker is 'a b'"):
            await registrar.ready(ABOUT, lambda: None)
        await registrar.leave()

    asyncio.run(main())
