"""The server of `pigou store`: values of other engines by the Redis protocol (RESP2, RESP3)."""

from __future__ import annotations

import asyncio
import hmac
import re
import socket
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from aiohttp import web
from prometheus_client import generate_latest
from prometheus_client.core import Metric

from pigou.kv.block import Bytes
from pigou.metric_rows import MetricSet, counter_family, gauge_family
from pigou.runtime.stores.page_store import PageStore, ValueStore
from pigou.stop_signals import StopSignals

#: Longest key in bytes, most parts of a command, and bytes of all of them.
_KEY, _PARTS, _COMMAND = 4096, 4096, 1 << 20
#: Bytes of a line, and read at once; seconds that a client may take for a command or value.
_LINE, _AHEAD, _PATIENCE = 64, 1 << 16, 30.0
#: Tenures with metrics of their own, largest first.
_TENURES = 100
_NUMBER = re.compile(rb"[*$]\d{1,12}\r\n")
#: Keys of LMCache with a salt or tags: of its daemon (hash last), and of engines (dtype last).
_SALTED = re.compile(
    rb"[^@]*@(?:[0-9a-f]{8}@[0-9a-f]+@[0-9a-f]+|\d+@\d+@-?[0-9a-f]+@\w+)"
    rb"@(.+?)(?:kv_bytes|metadata)?", re.DOTALL,
)  # fmt: skip


class _Client:
    """A connection: the loop reads commands, a thread at a time moves a value."""

    def __init__(self, connection: socket.socket, allowed: bool) -> None:
        self.allowed, self.nil = allowed, b"$-1\r\n"
        self._connection, self._ahead = connection, bytearray()

    async def number(self, mark: bytes, limit: int, what: str) -> int:
        """Read a count or length; raises ValueError beyond `limit`."""
        while (end := self._ahead.find(b"\n", 0, _LINE)) < 0:
            if len(self._ahead) >= _LINE:
                raise ValueError("Protocol error: a line is too long")
            await self._read()
        line = bytes(self._ahead[: end + 1])
        if line[:1] != mark or not _NUMBER.fullmatch(line):
            raise ValueError(f"Protocol error: expected {mark.decode()!r} and a number")
        if (number := int(line[1:])) > limit:
            raise ValueError(f"{what} has {number}; at most {limit}")
        del self._ahead[: end + 1]
        return number

    async def bulk(self) -> bytes:
        """Read a short string."""
        size = await self.number(b"$", _KEY, "a key, in bytes,")
        while len(self._ahead) < size + 2:
            await self._read()
        text = bytes(self._ahead[:size])
        del self._ahead[: size + 2]
        return text

    async def _read(self) -> None:
        data = await asyncio.get_running_loop().sock_recv(self._connection, _AHEAD)
        if not data:
            raise EOFError
        self._ahead += data

    def receive(self, view: memoryview) -> None:
        """Read a value, in a thread."""
        deadline, end = time.monotonic() + _PATIENCE, bytearray(2)
        for part in (view, memoryview(end)):
            done = min(len(part), len(self._ahead))
            part[:done] = self._ahead[:done]
            del self._ahead[:done]
            while done < len(part):
                self._connection.settimeout(max(0.001, deadline - time.monotonic()))
                if not (count := self._connection.recv_into(part[done:])):
                    raise EOFError
                done += count
        self._connection.setblocking(False)

    def send(self, *parts: bytes | memoryview) -> None:
        """Send a reply, in a thread."""
        self._connection.settimeout(_PATIENCE)
        for part in parts:
            self._connection.sendall(part)
        self._connection.setblocking(False)

    async def answer(self, reply: bytes) -> None:
        """Send a short reply."""
        async with asyncio.timeout(_PATIENCE):
            await asyncio.get_running_loop().sock_sendall(self._connection, reply)


class StoreServer:
    """Serves strings: SET, GET, MGET, EXISTS, DEL, and what clients ask when they connect."""

    def __init__(self, values: ValueStore, password: str, connections: int, buffers: int) -> None:
        self._values, self._password = values, password.encode()
        self._clients: set[asyncio.Task[None]] = set()
        self._max_clients = connections
        self._frames: asyncio.LifoQueue[Bytes] = asyncio.LifoQueue()
        for _ in range(buffers):
            self._frames.put_nowait(values.frame())
        self._threads = ThreadPoolExecutor(buffers, "store")
        self.metrics = MetricSet()
        self._bytes = self.metrics.counter("pigou_store_bytes", "Bytes of values.", "direction")
        self._refused = self.metrics.counter("pigou_store_refused", "Refusals.", "reason")
        self.metrics.scrape(lambda: store_metrics(values.store.stats(), len(self._clients)))

    async def run(self, listener: socket.socket) -> None:
        """Accept connections until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError:  # no descriptor is free
                await asyncio.sleep(0.2)
                continue
            self._clients.add(task := loop.create_task(self._serve(connection)))
            task.add_done_callback(self._clients.discard)

    async def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(EOFError, OSError, TimeoutError):
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._talk(_Client(connection, not self._password))

    async def _talk(self, client: _Client) -> None:
        """Answer commands until the connection ends, or sends what is refused."""
        try:
            if len(self._clients) > self._max_clients:
                raise ValueError("max number of clients reached")
            while await self._command(client):
                pass
        except ValueError as error:
            self._refused.labels("wrong").inc()
            code = "" if str(error).startswith(("NOAUTH", "WRONGPASS")) else "ERR "
            await client.answer(f"-{code}{error}\r\n".encode())

    async def _command(self, client: _Client) -> bool:
        count = await client.number(b"*", _PARTS, "a command, in parts,")
        words: list[bytes] = []
        left = _COMMAND
        async with asyncio.timeout(_PATIENCE):
            for i in range(count):
                if i == 2 and words[0].upper() == b"SET":
                    break
                words.append(await client.bulk())
                if (left := left - len(words[-1])) < 0:
                    raise ValueError(f"a command has over {_COMMAND} bytes")
        name = words[0].upper().decode("ascii", "replace") if words else ""
        if not client.allowed and name not in ("AUTH", "HELLO", "QUIT"):
            raise ValueError("NOAUTH Authentication required")
        if name == "SET" and len(words) == 2:
            if count != 3:
                raise ValueError("SET takes a key and a value, without options")
            await self._set(client, words[1])
        elif (name == "GET" and len(words) == 2) or (name == "MGET" and len(words) > 1):
            if name == "MGET":
                await client.answer(b"*%d\r\n" % (len(words) - 1))
            for key in words[1:]:
                await self._get(client, key)
        else:
            await client.answer(await self._answer(client, name, words[1:]))
        return name != "QUIT"

    async def _answer(self, client: _Client, name: str, words: Sequence[bytes]) -> bytes:
        values, reply = self._values, b"+OK\r\n"
        match name, words:
            case "EXISTS", [_, *_]:
                reply = b":%d\r\n" % sum(values.has(key, tenure_of(key)) for key in words)
            case (("DEL" | "UNLINK"), [_, *_]):
                gone = [await self._run(values.delete, key, tenure_of(key)) for key in words]
                reply = b":%d\r\n" % sum(gone)
            case ("AUTH", [*_, password]) | ("HELLO", [_, b"AUTH", _, password]):
                if not hmac.compare_digest(password, self._password):
                    raise ValueError("WRONGPASS invalid password")
                client.allowed = True
                reply = hello(client, words) if name == "HELLO" else reply
            case "HELLO", [(b"2" | b"3")] if client.allowed:
                reply = hello(client, words)
            case "PING", []:
                reply = b"+PONG\r\n"
            case (("PING" | "ECHO"), [word]):
                reply = b"$%d\r\n%b\r\n" % (len(word), word)
            case "COMMAND", _:
                reply = b"*0\r\n"
            case (("FLUSHDB" | "FLUSHALL"), []):
                await self._run(values.store.clear)
            case ("CLIENT", [_, *_]) | ("SELECT", [b"0"]) | ("QUIT", []):
                pass
            case _:
                self._refused.labels("unknown").inc()
                reply = f"-ERR unknown command or arguments {name[:32]!r}\r\n".encode()
        return reply

    async def _set(self, client: _Client, key: bytes) -> None:
        size = await client.number(b"$", self._values.max_bytes, "a value (--max-value), in bytes,")
        frame = await self._frames.get()  # while none is free, what the client sends waits

        def move() -> bool:
            client.receive(self._values.body(frame, size))
            return self._values.put(key, tenure_of(key), frame, size)

        try:
            held = await self._run(move)
        finally:
            self._frames.put_nowait(frame)
        self._bytes.labels("in").inc(size)
        if not held:
            self._refused.labels("room").inc()
        await client.answer(b"+OK\r\n")

    async def _get(self, client: _Client, key: bytes) -> None:
        if not self._values.has(key, tenure_of(key)):
            await client.answer(client.nil)
            return
        frame = await self._frames.get()

        def move() -> int:
            size = self._values.get(key, tenure_of(key), frame)
            if size < 0:
                client.send(client.nil)
            else:
                client.send(b"$%d\r\n" % size, self._values.body(frame, size), b"\r\n")
            return size

        try:
            size = await self._run(move)
        finally:
            self._frames.put_nowait(frame)
        self._bytes.labels("out").inc(max(0, size))

    async def _run(self, call: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *arguments)


def hello(client: _Client, words: Sequence[bytes]) -> bytes:
    """Switch to a version of the protocol; return the answer to HELLO."""
    head, client.nil = (b"%3", b"_\r\n") if words[0] == b"3" else (b"*6", b"$-1\r\n")
    fields = b"$6\r\nserver\r\n$5\r\npigou\r\n$7\r\nversion\r\n$5\r\n7.0.0\r\n$5\r\nproto\r\n:"
    return head + b"\r\n" + fields + words[0] + b"\r\n"


def tenure_of(key: bytes) -> str:
    """Return the cache salt or tags in a key of LMCache; empty for other keys."""
    match = _SALTED.fullmatch(key)
    return match[1].decode("utf-8", "surrogateescape") if match else ""


def store_metrics(stats: dict[str, Any], connections: int) -> Iterable[Metric]:
    """Yield the metrics of a page store: by tier, and of the largest tenures."""
    gauges = {
        "pages": "Pages", "used_bytes": "Bytes in use", "cap_bytes": "Most bytes",
        "price": "Price of a byte in seconds of prefill a second", "up": "1 if it works",
        "read_latency_s": "Seconds before the first page", "read_page_s": "Seconds a page",
    }  # fmt: skip
    for name, text in gauges.items():
        samples = [([tier["name"]], float(tier[name])) for tier in stats["tiers"]]
        yield gauge_family(f"pigou_store_{name}", f"{text}, by tier.", samples, "tier")
    for name in ("evicted", "corrupt", "expired", "written"):
        samples = [([tier["name"]], float(tier[name])) for tier in stats["tiers"]]
        yield counter_family(f"pigou_store_{name}_pages", f"Pages {name}.", samples, "tier")
    for name in ("hit", "missed"):
        yield counter_family(f"pigou_store_{name}_pages", f"Pages {name}.", stats[f"{name}_pages"])
    yield gauge_family("pigou_store_connections", "Open connections.", connections)
    largest = sorted(stats["tenures"].items(), key=lambda item: -item[1]["bytes"])[:_TENURES]
    for name in ("bytes", "quota_bytes"):
        samples = [([salt], float(of[name])) for salt, of in largest if of[name] is not None]
        yield gauge_family(f"pigou_store_tenure_{name}", f"{name}, by salt.", samples, "salt")


async def serve(server: StoreServer, store: PageStore, host: str, ports: tuple[int, int]) -> None:
    """Serve values and metrics until a signal; print where, once clients can connect."""

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(server.metrics.registry))

    async def health(_: web.Request) -> web.Response:
        up = any(tier["up"] for tier in store.stats()["tiers"])
        return web.Response(status=200 if up else 503)

    app = web.Application()
    app.add_routes([web.get("/metrics", metrics), web.get("/health", health)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    stop = asyncio.Event()
    with StopSignals(stop.set, _PATIENCE):
        await web.TCPSite(runner, host, ports[1]).start()
        with socket.create_server((host, ports[0]), backlog=128) as listener:
            listener.setblocking(False)
            task = asyncio.create_task(server.run(listener))
            print(f"{host}:{listener.getsockname()[1]}", flush=True)
            await asyncio.wait(
                [task, asyncio.create_task(stop.wait())], return_when=asyncio.FIRST_COMPLETED
            )
            task.cancel()
        await runner.cleanup()
