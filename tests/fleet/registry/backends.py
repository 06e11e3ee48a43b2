"""The registry's backends under test, each with a way to end leases and to blip its server."""

from __future__ import annotations

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Self

from tests.lib.fake_kubernetes import FakeKubernetes
from tests.lib.server_process import ServerProcess, etcd_server, nats_server

from pigou.fleet.registry.file_store import FileStore
from pigou.fleet.registry.record_store import MemoryStore, RecordStore
from pigou.fleet.registry.registry import Registry, open_store
from pigou.request import SECOND

Renewal = Callable[[], Awaitable[object]]


class Backend(ABC):
    """One backend, with records that no other test uses.

    Attributes:
        ttl_s: of the leases that tests take.
    """

    ttl_s = 10.0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await asyncio.sleep(0)

    @abstractmethod
    def client(self) -> RecordStore:
        """Return a client of its own of the same records."""

    @abstractmethod
    async def lapse(self, registry: Registry, worker: str, *renewals: Renewal) -> None:
        """Let time pass until the lease of a worker has ended.

        Args:
            registry: that is read meanwhile.
            worker: whose entry must vanish.
            renewals: of others, called meanwhile.
        """


class Clocked(Backend):
    """A backend whose clock is virtual."""

    def __init__(self) -> None:
        self.now = 0

    async def lapse(self, registry: Registry, worker: str, *renewals: Renewal) -> None:
        for _ in range(4):
            assert worker in await _workers(registry)
            self.now += round(self.ttl_s * SECOND / 3.9)
            for renew in renewals:
                await renew()
        assert worker not in await _workers(registry)


class Memory(Clocked):
    """Memory of this process."""

    def __init__(self) -> None:
        super().__init__()
        self._store = MemoryStore(lambda: self.now)

    def client(self) -> RecordStore:
        return self._store


class File(Clocked):
    """A folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder / "registry"

    def client(self) -> RecordStore:
        return FileStore(self._folder, lambda: self.now)


class Served(Backend):
    """A server that many tests use: each has records of its own."""

    ttl_s = 1.0
    _numbers = itertools.count()

    def __init__(self, server: ServerProcess, scheme: str) -> None:
        self.server = server
        self.url = f"{scheme}://127.0.0.1:{server.port}/test-{next(self._numbers)}"

    def client(self) -> RecordStore:
        return open_store(self.url)

    async def lapse(self, registry: Registry, worker: str, *renewals: Renewal) -> None:
        assert worker in await _workers(registry)
        async with asyncio.timeout(60):
            while worker in await _workers(registry):
                for renew in renewals:
                    await renew()
                await asyncio.sleep(0.1)


class Kubernetes(Backend):
    """Pods of a fake API server, whose kubelet the tests play."""

    def __init__(self) -> None:
        self.fake = FakeKubernetes()

    def client(self) -> RecordStore:
        return open_store(f"k8s://default?selector=app%3Dpigou&api={self.fake.url}")

    async def __aenter__(self) -> Self:
        await self.fake.start()
        for name in ("w0", "w1"):
            self.pod(name, ready=True)
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.fake.stop()

    def pod(self, name: str, *, ready: bool, restarts: int = 0, **labels: str) -> None:
        """Write a pod as its kubelet sees it."""
        status = {"podIP": "10.1.0.1", "containerStatuses": [{"restartCount": restarts}],
                  "conditions": [{"type": "Ready", "status": str(ready)}]}  # fmt: skip
        known = {pod["metadata"]["name"]: pod for pod in self.fake.store.all("pods")}
        pod = known.get(name) or {
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
            "spec": {"nodeName": "node-1", "containers": [
                {"name": "c", "resources": {"limits": {"nvidia.com/gpu": "2"}}}]},
        }  # fmt: skip
        pod["metadata"].setdefault("labels", {}).update(app="pigou", **labels)
        self.fake.store.put({**pod, "status": status})

    async def lapse(self, registry: Registry, worker: str, *renewals: Renewal) -> None:
        """The container is killed: the pod is not ready, then it runs again."""
        assert worker in await _workers(registry)
        self.pod(worker, ready=False)
        assert worker not in await _workers(registry)
        for renew in renewals:
            await renew()
        self.pod(worker, ready=True, restarts=1)
        assert worker not in await _workers(registry)


async def _workers(registry: Registry) -> set[str]:
    return {entry.worker for entry in (await registry.relist()).entries}


def server(scheme: str, folder: Path) -> ServerProcess:
    """Return the server of a backend; skip the test where it is not installed."""
    if scheme == "nats":
        return nats_server(folder)
    return etcd_server(folder, ("--heartbeat-interval", "20", "--election-timeout", "200"))
