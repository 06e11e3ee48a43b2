"""A stand for transfer tests: stores of random bytes, waited-for pulls, a proxy that misbehaves."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pigou.kv.block import Bytes, KVLayout
from pigou.request import SECOND
from pigou.worker.kv_transfer.block_store import HostBlockStore, SharedMemory
from pigou.worker.kv_transfer.receiver import Receiver
from pigou.worker.kv_transfer.transfer_params import TransferConfig, TransferResult

BLOCKS = 64
BLOCK_SIZE = 16
BLOCK_BYTES = 40_000


def layout(block_bytes: int = BLOCK_BYTES, **changes: Any) -> KVLayout:
    fields = {
        "model": "m",
        "digest": "d",
        "dtype": "float32",
        "block_size": BLOCK_SIZE,
        "layers": 2,
        "kv_heads": 2,
        "head_dim": 8,
        "block_bytes": block_bytes,
    }
    return KVLayout(**(fields | changes))


def config(**changes: Any) -> TransferConfig:
    return TransferConfig(**({"timeout": 2 * SECOND} | changes))


def ids(*values: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(values, dtype=np.int32)


class StagedStore(HostBlockStore):
    """Blocks that are reached by `read` and `write` only, as device memory is."""

    def as_bytes(self) -> None:  # type: ignore[override]
        return None


class GatedStore(StagedStore):
    """Stops in each write until it is let go on: holds a pull in its middle."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.reached = threading.Event()
        self.go = threading.Event()

    def write(self, ids: Any, data: Bytes) -> None:
        self.reached.set()
        assert self.go.wait(20)
        super().write(ids, data)


def empty_store(
    kind: type[HostBlockStore] = HostBlockStore, block_bytes: int = BLOCK_BYTES
) -> HostBlockStore:
    return kind(layout(block_bytes), np.zeros((BLOCKS, block_bytes), dtype=np.uint8))


def filled(memory: SharedMemory, block_bytes: int = BLOCK_BYTES, seed: int = 0) -> HostBlockStore:
    rows = memory.buffer[: BLOCKS * block_bytes].reshape(BLOCKS, block_bytes)
    rows[:] = np.random.default_rng(seed).integers(0, 256, rows.shape, dtype=np.uint8)
    return HostBlockStore(layout(block_bytes), rows)


def memory(block_bytes: int = BLOCK_BYTES) -> SharedMemory:
    return SharedMemory(BLOCKS * block_bytes)


class Wait:
    """Collects the outcomes of pulls."""

    def __init__(self) -> None:
        self.outcomes: list[TransferResult] = []
        self._came = threading.Condition()

    def __call__(self, outcome: TransferResult) -> None:
        with self._came:
            self.outcomes.append(outcome)
            self._came.notify_all()

    def one(self, seconds: float = 60) -> TransferResult:
        with self._came:
            assert self._came.wait_for(lambda: self.outcomes, seconds), "the pull never ended"
            assert len(self.outcomes) == 1
            return self.outcomes[0]


def pull(receiver: Receiver, params: object, dest: Any, first: int = 0) -> TransferResult:
    wait = Wait()
    receiver.pull(params, first, dest, wait)
    return wait.one()


def eventually(true: Callable[[], object], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.005)


@dataclass
class Proxy:
    """Relays one connection after another; `alter` sees what the server sends, with its offset.

    `alter(offset, data)` returns the bytes to pass on, or None to cut both connections.
    """

    target: int
    alter: Callable[[int, bytes], bytes | None]

    def __post_init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self.target))
                for pair in ((client, server, None), (server, client, self.alter)):
                    thread = threading.Thread(target=self._relay, args=pair, daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _relay(self, source: socket.socket, sink: socket.socket, alter: Any) -> None:
        offset = 0
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                passed = alter(offset, data) if alter else data
                offset += len(data)
                if passed is None:
                    break
                sink.sendall(passed)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(5)


@contextlib.contextmanager
def proxied(
    params: dict[str, Any], alter: Callable[[int, bytes], bytes | None]
) -> Iterator[dict[str, Any]]:
    """The same ticket, but through a proxy that alters what the sender says."""
    proxy = Proxy(params["remote_port"], alter)
    try:
        yield params | {"remote_port": proxy.port}
    finally:
        proxy.close()
