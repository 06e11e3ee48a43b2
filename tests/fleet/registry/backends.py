"""The registry's backends under test, each with a way to end leases and to blip its server."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from pigou.fleet.registry.file_store import FileStore
from pigou.fleet.registry.memory_store import MemoryStore
from pigou.fleet.registry.record_store import RecordStore
from pigou.request import SECOND


class Backend(ABC):
    """One backend.

    Attributes:
        ttl_s: of the leases that tests take.
        has_server: whether there is a server that can be away.
    """

    ttl_s = 10.0
    has_server = False

    @abstractmethod
    def client(self) -> RecordStore:
        """Return a client of its own of the same records."""

    async def lapse(self, *alive: Callable[[], object]) -> None:
        """Let the time of a lease pass; what `alive` does meanwhile renews others."""
        raise NotImplementedError

    async def stop(self) -> None:
        """Kill the server."""
        await asyncio.sleep(0)

    async def start(self) -> None:
        """Start the server again with its data."""
        await asyncio.sleep(0)


class Clocked(Backend):
    """A backend whose clock is virtual."""

    def __init__(self) -> None:
        self.now = 0

    async def lapse(self, *alive: Callable[[], object]) -> None:
        for _ in range(4):
            self.now += round(self.ttl_s * SECOND / 3.9)
            for renew in alive:
                await renew()  # type: ignore[misc]


class Memory(Clocked):
    """Memory of this process."""

    def __init__(self) -> None:
        super().__init__()
        self._store = MemoryStore(lambda: self.now)

    def client(self) -> RecordStore:
        return self._store


class File(Clocked):
    """A folder; each client sees the time pass by itself."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder / "registry"

    def client(self) -> RecordStore:
        return FileStore(self._folder, lambda: self.now)


BACKENDS = ("memory", "file")


@asynccontextmanager
async def backend(name: str, folder: Path) -> AsyncIterator[Backend]:
    """Run a backend; skip the test where its server or client is not installed."""
    made: Backend = {"memory": Memory, "file": lambda: File(folder)}[name]()
    try:
        await made.start()
        yield made
    finally:
        await made.stop()
