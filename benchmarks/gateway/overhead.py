"""What the gateway costs: added time to the first token, and chunks relayed per CPU-second.

Run as `python -m benchmarks.gateway.overhead`. All upstreams are stubs that answer at once
(`benchmarks/lib/stub_worker.py`). The ways to them (direct, Pigou's gateway, sglang-router where
PIGOU_PEER_SGLANG_ROUTER names its venv) take turns of 20 requests, in one run. CPU time is that
of the process in front (user and system), over the chunks that reached the client through it.
Chunks are `paced` (each alone, one every 20 ms in each of 64 streams) or come in a `flood` (as
fast as they go). On a machine with other work the times are those of waiting for a core.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import uvloop

from benchmarks.lib.peers import PeerMissing, start_sglang_router
from benchmarks.lib.servers import LOOPBACK, Server, free_ports, get_json, machine

PROMPTS = (128, 8192)
_MARK = b'"finish_reason"'
_KEPT = 40
#: Requests that a way is asked in one turn.
_TURN = 20


@dataclass
class Way:
    """One way to the stub."""

    name: str
    url: str
    pid: int = 0
    ttft: dict[int, list[float]] = field(default_factory=dict)
    chunks_per_cpu_s: dict[str, list[float]] = field(default_factory=dict)


def request_bytes(url: str, tokens: int, chunks: int, pause_s: float) -> bytes:
    """Return a streamed request with a prompt of about `tokens` tokens, 4 characters each."""
    body = json.dumps(
        {
            "model": "stub",
            "prompt": "word" * tokens,
            "max_tokens": chunks,
            "temperature": pause_s,  # the stub's, between chunks
            "stream": True,
        }
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {urlsplit(url).netloc}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class HTTPConnection:
    """A kept-alive connection that sends prepared requests."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, url: str) -> HTTPConnection:
        """Connect."""
        host, port = urlsplit(url).netloc.split(":")
        return cls(*await asyncio.open_connection(host, int(port), limit=1 << 20))

    async def ask(self, request: bytes) -> tuple[float, int]:
        """Return seconds to the first token, and how many chunks came."""
        start = time.perf_counter()
        self._writer.write(request)
        seen, count, first = b"", 0, 0.0
        while not seen.endswith(b"\r\n0\r\n\r\n"):  # a header may end with a 0
            data = await self._reader.read(1 << 18)
            if not data:
                raise ConnectionError("the stream broke off")
            kept = seen[-_KEPT:]
            count += (kept + data).count(_MARK) - kept.count(_MARK)
            seen = kept + data if first else seen + data
            if not first and not seen.startswith(b"HTTP/1.1 200"[: len(seen)]):
                raise ConnectionError(f"refused: {seen[:400]!r}")
            if not first and b"data: {" in seen:
                first = time.perf_counter() - start
        if b"data: [DONE]" not in seen:
            raise ConnectionError(f"no end of stream: {seen[-200:]!r}")
        return first, count

    def close(self) -> None:
        """Hang up."""
        self._writer.close()


async def measure_ttft(ways: Sequence[Way], rounds: int) -> None:
    """Ask the ways in turn, a few requests one after the other each time.

    Turns of one request would measure how cold a process gets while a slow one has its turn.
    """
    for tokens in PROMPTS:
        lines = [await HTTPConnection.open(way.url) for way in ways]
        requests = [request_bytes(way.url, tokens, 2, 0.0) for way in ways]
        for turn in range(1 + -(-rounds // _TURN)):
            for way, line, request in zip(ways, lines, requests, strict=True):
                found = [(await line.ask(request))[0] for _ in range(_TURN)]
                if turn > 0:  # the first ones warm up
                    way.ttft.setdefault(tokens, []).extend(found)
        for line in lines:
            line.close()


async def measure_chunks(ways: Sequence[Way], mode: str, streams: int, rounds: int) -> None:
    """Run many streams at once through each way in turn; note chunks per CPU-second."""
    pause_s, chunks = {"paced": (0.02, 300), "flood": (0.0, 1500)}[mode]
    for _ in range(rounds):
        for way in ways:
            if not way.pid:
                continue
            lines = [await HTTPConnection.open(way.url) for _ in range(streams)]
            request = request_bytes(way.url, 128, chunks, pause_s)
            before = cpu_seconds(way.pid)
            found = await asyncio.gather(*(line.ask(request) for line in lines))
            spent = cpu_seconds(way.pid) - before
            total = sum(count for _, count in found)
            # A proxy may cut the body anywhere, also within what is counted.
            if not 0.995 * streams * chunks <= total <= streams * chunks:
                raise RuntimeError(f"{way.name}: {total} chunks of {streams * chunks} came")
            way.chunks_per_cpu_s.setdefault(mode, []).append(total / spent)
            for line in lines:
                line.close()


def cpu_seconds(pid: int) -> float:
    """Return user and system time of a process and its children, in seconds.

    Linux counts it in nanoseconds for each thread; the times of a whole process are cut to
    hundredths of a second, some percent of what is measured here.
    """
    process = psutil.Process(pid)
    spent = 0.0
    for each in [process, *process.children(recursive=True)]:
        threads = list(Path(f"/proc/{each.pid}/task").glob("*/schedstat"))
        if threads:
            spent += sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9
        else:
            times = each.cpu_times()
            spent += times.user + times.system
    return spent


def start_ways(stack: ExitStack, folder: Path) -> list[Way]:
    """Start stubs, gateways and the peer; return the ways."""
    ports = free_ports(4)
    stubs = [
        stack.enter_context(
            Server(
                [sys.executable, "-m", "benchmarks.lib.stub_worker", str(port)],
                url=f"http://{LOOPBACK}:{port}",
                log=folder / f"stub-{port}.log",
            )
        ).wait_healthy()
        for port in ports[:2]
    ]
    urls = [stub.url for stub in stubs]
    ways = [Way("direct", urls[0])]
    for name, port, attach in (
        ("pigou, one leg", ports[2], [urls[0]]),
        ("pigou, two legs", ports[3], [f"{urls[0]},role=prefill", f"{urls[1]},role=decode"]),
    ):
        argv = [sys.executable, "-m", "pigou", "serve", "--port", str(port)]
        for each in attach:
            argv += ["--attach", each]
        server = Server(argv, url=f"http://{LOOPBACK}:{port}", log=folder / f"{port}.log")
        stack.enter_context(server).wait_healthy()
        ways.append(Way(name, server.url, server.pid))
    try:
        router = start_sglang_router(urls[:1], log=folder / "router.log")
        stack.enter_context(router)
        ways.append(Way("sglang-router", router.url, router.pid))
    except PeerMissing as missing:
        print(f"sglang-router is skipped: {missing}")
    return ways


def report(ways: Sequence[Way], as_json: bool) -> None:
    """Print medians, and quartiles of what is asserted on."""
    direct = ways[0]
    rows = []
    for way in ways:
        row: dict[str, object] = {"way": way.name}
        for tokens in PROMPTS:
            own, base = way.ttft[tokens], direct.ttft[tokens]
            row[f"ttft_{tokens}_ms"] = round(1e3 * statistics.median(own), 3)
            added = [a - b for a, b in zip(own, base, strict=True)]
            quarter = statistics.quantiles(added, n=4)
            row[f"added_{tokens}_ms"] = [round(1e3 * q, 3) for q in quarter]
        for mode, values in way.chunks_per_cpu_s.items():
            row[f"{mode}_chunks_per_cpu_s"] = [round(v) for v in sorted(values)]
        rows.append(row)
    if as_json:
        print(json.dumps({"machine": machine(), "ways": rows}))
        return
    print("; ".join(f"{name} {value}" for name, value in machine().items()))
    for row in rows:
        print(f"{row.pop('way')}:")
        for name, value in row.items():
            note = "  (lower quartile, median, upper quartile)" if name.startswith("added") else ""
            print(f"  {name:26} {value}{note}")


async def run(ways: Sequence[Way], rounds: int, streams: int, repeats: int) -> None:
    await measure_ttft(ways, rounds)
    for mode in ("paced", "flood"):
        await measure_chunks(ways, mode, streams, repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=300, help="requests for each TTFT")
    parser.add_argument("--streams", type=int, default=64, help="streams at once")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each chunk measurement")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        ways = start_ways(stack, Path(folder))
        for way in ways[1:3]:
            up = [row["state"] == "up" for row in get_json(way.url + "/workers")["workers"]]
            if not all(up):
                raise RuntimeError(f"{way.name}: a stub is not up")
        uvloop.run(run(ways, args.rounds, args.streams, args.repeats))
        report(ways, args.json)


if __name__ == "__main__":
    main()
