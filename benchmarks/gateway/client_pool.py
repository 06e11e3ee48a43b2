"""What a real HTTP client does when it has more users than connections.

    python -m benchmarks.gateway.client_pool [--users 128,512] [--limit 100] [--dispatch
    loops|tasks]
                                     [--speed 10] [--jitter 0.02]

A server that computes nothing sleeps for what a request takes in the paper's Table 4 (5.42 s, the
first token after 0.12 s), with time running faster. In front of it is aiohttp with its default
connector, as `pigou experiment --reading client-pool` supposes of the paper's load generator. The
ramp of 30 s and the hold of 120 s are the paper's. Printed in the paper's seconds:

- TTFT P99 from the intention to send, of the requests that ended within the hold;
- barging: of the requests that were meant to be sent while others waited for a connection, the
  share that went before them.

`--dispatch tasks` makes a new task for each request behind a semaphore, `loops` has each user in
a loop of its own: there, whoever frees a connection asks for the next before any that waits is
woken, and is served first, unless several requests end in the same turn of the event loop: then
whoever was woken for the one takes the connection of the other. So barging falls as more of them
end at once: with `--speed`, and with too little `--jitter` of the times. `--limit 0` takes the
pool away.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import numpy as np

from benchmarks.lib.servers import LOOPBACK, Server, free_ports, machine

FIRST, WHOLE = 0.12, 5.42
RAMP, HOLD = 30.0, 120.0
_CHUNK = b"5\r\ndata:\r\n"
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Sleeper(asyncio.Protocol):
    """Answers each request with two chunks, after two sleeps."""

    def __init__(self, speed: float, jitter: float) -> None:
        self._speed, self._jitter = speed, jitter
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Begin to sleep once a request is complete; it has no body."""
        self._rest += data
        while (end := self._rest.find(b"\r\n\r\n")) >= 0:
            health = self._rest.startswith(b"GET /health")
            self._rest = self._rest[end + 4 :]
            if health:
                self._write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            else:
                loop = asyncio.get_running_loop()
                loop.call_later(FIRST / self._speed, self._write, _HEAD + _CHUNK)
                whole = WHOLE * (1.0 + random.uniform(-self._jitter, self._jitter))
                loop.call_later(whole / self._speed, self._write, _CHUNK + b"0\r\n\r\n")

    def _write(self, data: bytes) -> None:
        assert isinstance(self._transport, asyncio.Transport)
        if not self._transport.is_closing():
            self._transport.write(data)


@dataclass
class Seen:
    """Requests of a level: (intended, connected, first chunk, end), in the paper's seconds.

    `passed` has, for each request that was meant to be sent while others waited for a
    connection, whether it went before them.
    """

    times: list[tuple[float, float, float, float]] = field(default_factory=list)
    passed: list[bool] = field(default_factory=list)


class Load:
    """One level of concurrency."""

    def __init__(self, url: str, users: int, limit: int, speed: float) -> None:
        self._url, self._users, self._limit, self._speed = url, users, limit, speed
        self._seen = Seen()
        self._waiting: set[int] = set()
        self._count = 0
        self._began = 0.0

    async def run(self, dispatch: str) -> Seen:
        """Ramp, hold, and wait for the requests under way."""
        trace = aiohttp.TraceConfig()
        trace.on_connection_reuseconn.append(self._connected)
        trace.on_connection_create_end.append(self._connected)
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self._limit),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
            trace_configs=[trace],
        ) as session:
            self._began = time.monotonic()
            async with asyncio.TaskGroup() as group:
                if dispatch == "loops":
                    for user in range(self._users):
                        group.create_task(self._loop(session, RAMP * user / self._users))
                else:
                    group.create_task(self._tasks(session, group))
        return self._seen

    def _now(self) -> float:
        return (time.monotonic() - self._began) * self._speed

    async def _loop(self, session: aiohttp.ClientSession, begin: float) -> None:
        await asyncio.sleep(begin / self._speed)
        while (now := self._now()) < RAMP + HOLD:
            await self._one(session, now)

    async def _tasks(self, session: aiohttp.ClientSession, group: asyncio.TaskGroup) -> None:
        """A semaphore admits as many as there are users; each request is a task of its own."""
        free = asyncio.Semaphore(0)

        async def one(now: float) -> None:
            await self._one(session, now)
            free.release()

        async def ramp() -> None:
            for user in range(self._users):
                await asyncio.sleep(max(0.0, RAMP * user / self._users - self._now()) / self._speed)
                free.release()

        group.create_task(ramp())
        while self._now() < RAMP + HOLD:
            await free.acquire()
            if (now := self._now()) < RAMP + HOLD:
                group.create_task(one(now))

    async def _one(self, session: aiohttp.ClientSession, intended: float) -> None:
        self._count += 1
        mark = {"number": self._count, "others": bool(self._waiting), "connected": 0.0}
        self._waiting.add(self._count)
        async with session.get(self._url, trace_request_ctx=mark) as reply:
            await reply.content.readany()
            first = self._now()
            await reply.content.read()
        self._seen.times.append((intended, float(mark["connected"]), first, self._now()))

    async def _connected(self, _: aiohttp.ClientSession, context: object, __: object) -> None:
        mark = context.trace_request_ctx  # type: ignore[attr-defined]
        mark["connected"] = self._now()
        self._waiting.discard(mark["number"])
        if mark["others"]:
            self._seen.passed.append(min(self._waiting, default=2**62) < mark["number"])


def report(seen: Seen, users: int, limit: int, speed: float) -> str:
    """Return a line of figures; nobody barges where there are connections for all."""
    end = RAMP + HOLD
    inside = np.array([each for each in seen.times if each[3] <= end])
    every = np.array(seen.times)
    p99 = float(np.quantile(inside[:, 2] - inside[:, 0], 0.99, method="inverted_cdf"))
    drained = float(np.quantile(every[:, 2] - every[:, 0], 0.99, method="inverted_cdf"))
    server = float(np.quantile(inside[:, 2] - inside[:, 1], 0.99, method="inverted_cdf"))
    barging = f"{np.mean(seen.passed):.3f}" if 0 < limit < users and seen.passed else "-"
    return (
        f"{users:5d} {p99:12.2f} {drained:14.2f} {server:13.3f} {len(inside) / end:7.2f} "
        f"{barging:>8s} {(float(every[:, 3].max()) if len(every) else 0) / speed:8.1f}"
    )


async def serve(port: int, speed: float, jitter: float) -> None:
    """Sleep for whoever asks, until killed."""
    random.seed(1)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Sleeper(speed, jitter), LOOPBACK, port, backlog=4096)
    await server.serve_forever()


async def measure(args: argparse.Namespace, url: str) -> None:
    """Run the levels one after another."""
    how = f"{args.dispatch}, time x{args.speed:g}, jitter {args.jitter:g}"
    print(f"aiohttp {aiohttp.__version__}, limit {args.limit}, {how}")
    print("    C   TTFT P99 s  with drain s  server P99 s     rps  barging  wall s")
    for users in map(int, args.users.split(",")):
        for _ in range(args.rounds):
            load = Load(url, users, args.limit, args.speed)
            seen = await load.run(args.dispatch)
            print(report(seen, users, args.limit, args.speed), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--users", default="96,128,192,256,384,512", help="levels, as in 128,512")
    parser.add_argument("--limit", type=int, default=100, help="connections; 0 for no limit")
    parser.add_argument("--dispatch", choices=("loops", "tasks"), default="loops")
    parser.add_argument("--speed", type=float, default=10.0, help="times as fast as the paper")
    parser.add_argument("--jitter", type=float, default=0.02, help="share that times vary by")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--serve", type=int, default=0, metavar="PORT", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        asyncio.run(serve(args.serve, args.speed, args.jitter))
        return
    print(", ".join(f"{key} {value}" for key, value in machine().items()))
    (port,) = free_ports(1)
    with tempfile.TemporaryDirectory() as folder:
        argv = [sys.executable, "-m", "benchmarks.gateway.client_pool", "--serve", str(port)]
        argv += ["--speed", str(args.speed), "--jitter", str(args.jitter)]
        with Server(argv, url=f"http://{LOOPBACK}:{port}", log=Path(folder) / "log") as server:
            server.wait_healthy()
            asyncio.run(measure(args, server.url + "/generate"))


if __name__ == "__main__":
    main()
