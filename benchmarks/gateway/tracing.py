"""What traces cost: CPU of the gateway for a request, traced and not.

Run as `python -m benchmarks.gateway.tracing`. Gateways that differ in nothing else stand before
the same stub and take turns, in an order that is drawn anew each round: `off`, `off again` (whose
ratio is the scatter of the method), `on` (every request is sampled, and its spans go to a receiver
that answers at once), and with `--before FOLDER` that of another checkout. CPU time is that of the
gateway's process, the exporter's thread included, over the requests of a turn. The ratio is to
`off` in the same round. Chunks come one by one (`--pause`): in a flood, CPU depends on how many
of them a read finds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.gateway.overhead import HTTPConnection, Way, cpu_seconds, request_bytes
from benchmarks.lib.servers import LOOPBACK, Server, free_ports, get_json, machine

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
_SETTLE_S = 1.2


class Receiver(BaseHTTPRequestHandler):
    """Takes whatever comes, and counts it."""

    protocol_version = "HTTP/1.1"
    spans = size = 0

    def do_POST(self) -> None:
        """Answer at once."""
        data = self.rfile.read(int(self.headers["content-length"]))
        Receiver.spans += data.count(b'"spanId"')
        Receiver.size += len(data)
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def do_GET(self) -> None:
        """Say what came."""
        said = json.dumps({"spans": Receiver.spans, "bytes": Receiver.size}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def start(stack: ExitStack, folder: Path, before: str) -> tuple[dict[str, Way], str]:
    """Start stub, receiver and gateways; return the gateways by name, and the receiver's URL."""
    names = ["off", "off again", "on", *(["before"] if before else [])]
    receiving, port, *ports = free_ports(2 + len(names))
    receiver_argv = [
        sys.executable,
        "-m",
        "benchmarks.gateway.tracing",
        "--receive",
        str(receiving),
    ]
    url = f"http://{LOOPBACK}:{receiving}"
    receiver = stack.enter_context(Server(receiver_argv, url=url, log=folder / "receiver.log"))
    receiver.wait_healthy()
    stub_argv = [sys.executable, "-m", "benchmarks.lib.stub_worker", str(port)]
    stub = Server(stub_argv, url=f"http://{LOOPBACK}:{port}", log=folder / "stub.log")
    stack.enter_context(stub).wait_healthy()
    ways = {}
    for name, port in zip(names, ports, strict=True):
        argv = [sys.executable, "-m", "pigou", "serve", "--port", str(port), "--attach", stub.url]
        env = {"PYTHONPATH": str(Path(before) / "src")} if name == "before" else {}
        if name == "on":
            argv += ["--otlp-traces-endpoint", f"{url}/v1/traces"]
        log = folder / f"{name}.log"
        server = Server(argv, url=f"http://{LOOPBACK}:{port}", log=log, env=env)
        stack.enter_context(server).wait_healthy()
        ways[name] = Way(name, server.url, server.pid)
    return ways, url


async def turn(way: Way, requests: int, chunks: int, streams: int, pause_s: float) -> float:
    """Return the microseconds of CPU that a request takes."""
    lines = [await HTTPConnection.open(way.url) for _ in range(streams)]
    request = request_bytes(way.url, 128, chunks, pause_s)

    async def one(line: HTTPConnection) -> None:
        for _ in range(requests // streams):
            await line.ask(request)

    before = cpu_seconds(way.pid)
    await asyncio.gather(*(one(line) for line in lines))
    await asyncio.sleep(_SETTLE_S)  # until its spans are sent
    spent = cpu_seconds(way.pid) - before
    for line in lines:
        line.close()
    return 1e6 * spent / (requests // streams * streams)


async def measure(
    ways: dict[str, Way], rounds: int, requests: int, chunks: int, streams: int, pause_s: float
) -> dict[str, list[float]]:
    """Return the microseconds of each round by gateway; the first round warms up."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    order = list(ways)
    for number in range(rounds + 1):
        random.shuffle(order)
        for name in order:
            spent = await turn(ways[name], requests, chunks, streams, pause_s)
            if number:
                found[name].append(spent)
    return found


def summary(found: dict[str, list[float]]) -> dict[str, dict[str, Any]]:
    """Return medians, and quartiles of the ratio to `off` in the same round."""
    rows: dict[str, dict[str, Any]] = {}
    for name, values in found.items():
        ratios = [a / b for a, b in zip(values, found["off"], strict=True)]
        quarters = statistics.quantiles(ratios, n=4) if name != "off" else [1.0] * 3
        rows[name] = {
            "cpu_us_per_request": round(statistics.median(values), 1),
            "ratio_quartiles": [round(quarter, 4) for quarter in quarters],
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--requests", type=int, default=128, help="of a turn")
    parser.add_argument("--chunks", type=int, default=64, help="of each stream")
    parser.add_argument("--streams", type=int, default=32, help="at once")
    parser.add_argument("--pause", type=float, default=5.0, help="milliseconds between chunks")
    parser.add_argument("--before", default="", help="another checkout, to compare with")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--receive", type=int, default=0, help="be the receiver, on this port")
    args = parser.parse_args()
    if args.receive:
        ThreadingHTTPServer((LOOPBACK, args.receive), Receiver).serve_forever()
    os.environ.pop(ENDPOINT, None)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        ways, url = start(stack, Path(folder), args.before)
        sizes = (args.rounds, args.requests, args.chunks, args.streams, args.pause / 1e3)
        found = uvloop.run(measure(ways, *sizes))
        came = get_json(url)
    traced = (args.rounds + 1) * (args.requests // args.streams * args.streams)
    said = {
        "machine": machine(), "chunks": args.chunks, "rounds": args.rounds,
        "spans_per_request": round(came["spans"] / traced, 2),
        "bytes_per_request": round(came["bytes"] / traced), "gateways": summary(found),
    }  # fmt: skip
    if args.json:
        print(json.dumps(said))
        return
    print("; ".join(f"{name} {value}" for name, value in machine().items()))
    print(f"{said['spans_per_request']} spans, {said['bytes_per_request']} bytes a traced request")
    for name, row in summary(found).items():
        low, middle, high = row["ratio_quartiles"]
        print(
            f"{name:10} {row['cpu_us_per_request']:9.1f} us of CPU a request, "
            f"{middle:.4f} of off (quartiles {low:.4f} to {high:.4f})"
        )


if __name__ == "__main__":
    main()
