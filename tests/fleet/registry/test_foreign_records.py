"""What is in a registry and is no worker's is skipped, counted and told of once; workers stay."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.fleet.registry.backends import Kubernetes, server
from tests.fleet.registry.entries import entry
from tests.lib.foreign_files import DEEP, scatter

from pigou.fleet.registry.file_store import FileStore
from pigou.fleet.registry.record_store import RegistryUnavailable
from pigou.fleet.registry.registry import Registry, open_store


def test_foreign_files_of_a_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        folder = tmp_path / "registry"
        registry = Registry(FileStore(folder))
        await registry.register(entry("w0"))
        count = scatter(folder)
        os.mkfifo(folder / "w1.json")
        with caplog.at_level(logging.WARNING):
            began = time.monotonic()
            for _ in range(20):
                snapshot = await registry.relist()
                assert [e.worker for e in snapshot.entries] == ["w0"]
                assert snapshot.ignored == count + 1
            assert time.monotonic() - began < 20.0
        kinds = len(caplog.records)
        assert 3 <= kinds < 12, [r.message for r in caplog.records]
        await registry.register(entry("w1"))  # what is in its place goes
        assert len((await registry.relist()).entries) == 2
        assert sum(t.name.startswith("registry files") for t in threading.enumerate()) == 1
        await registry.close()

    asyncio.run(main())


@pytest.mark.parametrize("how", ["held", "fifo", "folder", "link"])
def test_a_lock_that_cannot_be_had_is_an_error_in_time(tmp_path: Path, how: str) -> None:
    lock = tmp_path / ".lock"
    if how == "held":
        holder = lock.open("w")
        fcntl.flock(holder, fcntl.LOCK_EX)
    elif how == "fifo":
        os.mkfifo(lock)
    elif how == "folder":
        lock.mkdir()
    else:
        lock.symlink_to("/dev/null")

    async def main() -> None:
        store = FileStore(tmp_path)
        async with asyncio.timeout(60):
            with pytest.raises(RegistryUnavailable, match=r"\.lock"):
                await store.put("w0", b"x", 1.0, None)
            assert await store.get("w0") is None
        await store.close()

    asyncio.run(main())


def test_a_pod_that_makes_no_entry_leaves_the_others() -> None:
    async def main() -> None:
        async with Kubernetes() as made:
            stock = {"pigou.dev/stock-role": "decode", "pigou.dev/model": "llama"}
            made.pod("good", ready=True, **stock)
            made.pod("x" * 200, ready=True, **stock)  # longer than a worker's name
            made.pod("odd", ready=True, **stock)
            odd = next(p for p in made.fake.store.all("pods") if p["metadata"]["name"] == "odd")
            made.fake.store.put({**odd, "status": {**odd["status"], "conditions": [1]}})
            registry = Registry(made.client())
            snapshot = await registry.relist()
            assert [e.worker for e in snapshot.entries] == ["good"]
            assert snapshot.ignored == 2
            await registry.close()

    asyncio.run(main())


def test_a_large_pod_does_not_end_the_watch() -> None:
    async def main() -> None:
        async with Kubernetes() as made:
            store, woken = made.client(), asyncio.Event()
            watching = asyncio.create_task(store.watch(woken.set))
            for note in ("x" * 200_000, "y" * 200_000):
                await asyncio.wait_for(woken.wait(), 60)
                await asyncio.sleep(0.1)
                woken.clear()
                pod = made.fake.store.all("pods")[0]
                meta = {**pod["metadata"], "annotations": {"note": note}}
                made.fake.store.put({**pod, "metadata": meta})
            await asyncio.wait_for(woken.wait(), 60)
            assert not watching.done()
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await store.close()

    asyncio.run(main())


@pytest.mark.parametrize("scheme", ["etcd", "nats"])
def test_foreign_values_of_a_server(tmp_path: Path, scheme: str) -> None:
    """Values of more than a message together, junk and odd keys."""
    pytest.importorskip({"nats": "nats", "etcd": "aetcd"}[scheme])
    junk = {f"large-{i}": b"x" * 900_000 for i in range(6)}
    junk |= {"deep": DEEP, "latin": b"\xff\xfe", "null": b"null", "empty-list": b"[]"}

    async def main(url: str) -> None:
        store: Any = open_store(url)
        registry = Registry(store)
        await registry.register(entry("w0", ttl_s=60.0))
        for key, value in junk.items():
            await store.put(key, value, 60.0, None)
        if scheme == "nats":  # whose client refuses such keys
            for key in ("@w", "ü", "a/b"):
                client = await store._connection()
                await client.jetstream().publish(f"$KV.workers.{key}", b"x")
                junk[key] = b"x"
        snapshot = await registry.relist()
        assert [e.worker for e in snapshot.entries] == ["w0"]
        assert snapshot.ignored == len(junk)
        await registry.close()

    with server(scheme, tmp_path) as process:
        asyncio.run(main(f"{scheme}://127.0.0.1:{process.port}/workers"))
