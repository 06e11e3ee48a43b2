"""What the endpoint picker adds to a request: seconds from its last byte to the pick.

Run as `python -m benchmarks.integrations.epp [--seconds 5]`. A client that behaves as Envoy does
sends chats in chunks of 16 KiB by open loop, at 300/s with prompts of 20 kB, and 20/s with 220 kB.
`sessions` are chats that grow by a message a turn, as agents' do; `distinct` prompts have no text
in common. Times are the client's: from the write of the last chunk to the answer with the
endpoint, gRPC both ways included. CPU is user and system time of each process over its requests.
`decision` rows are CPU time alone, of one process without gRPC: from the last byte taken to the
answer given, one request after another. They hold on a busy machine, where the others do not.
`--hop` sends them as compressed too, which are not read: the floor of gRPC and streams alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import grpc.aio
import psutil
import uvloop
from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as ext_proc
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    HttpBody,
    HttpHeaders,
    ProcessingRequest,
    ProcessingResponse,
    ProtocolConfiguration,
)

from benchmarks.lib.servers import LOOPBACK, Server, free_ports, machine
from pigou.config import ControlConfig
from pigou.fleet.config import AttachedWorker
from pigou.fleet.supervisor import FleetSetup
from pigou.gateway.config import GatewayConfig
from pigou.integrations.endpoint_picker import Receive, Send
from pigou.integrations.epp_config import EppConfig
from pigou.integrations.epp_server import PickerServing

_DUPLEX = ProcessingMode.FULL_DUPLEX_STREAMED
_CHUNK = 16 * 1024
_WORKERS, _SESSIONS, _TURN_BYTES = 4, 48, 600
#: Prompt bytes and requests per second; the least p50 asked for, in milliseconds.
LOADS = ((20_000, 300.0, 2.0), (220_000, 20.0, 10.0))
_MODEL = Path(__file__).parents[2] / "src/pigou/models/tiny"
_CONFIG = ProtocolConfiguration(request_body_mode=_DUPLEX, response_body_mode=_DUPLEX)
_REPLY = b'data: {"choices":[{"index":0,"text":" a","finish_reason":"stop"}]}\n\n'


def text(rng: random.Random, size: int) -> str:
    """Return words that are pronounceable, so that a tokenizer splits them as it does prose."""
    words: list[str] = []
    while size > 0:
        word = "".join(
            rng.choice("bdfgklmnprst") + rng.choice("aeiou") for _ in range(rng.randint(1, 3))
        )
        words.append(word + rng.choice(("", "", "", "", ".", ",")))
        size -= len(words[-1]) + 1
    return " ".join(words)


def chats(kind: str, size: int, seed: int) -> Iterator[bytes]:
    """Yield bodies with prompts of about `size` bytes."""
    rng = random.Random(seed)
    spread = size // 4
    sessions = [
        [{"role": "user", "content": text(rng, size - spread // 2 - _TURN_BYTES)}]
        for _ in range(_SESSIONS if kind == "sessions" else 0)
    ]
    number = 0
    while True:
        if kind == "sessions":
            messages = sessions[number % _SESSIONS]
            role = "assistant" if len(messages) % 2 else "user"
            if sum(len(message["content"]) for message in messages) > size + spread:
                del messages[1:]
            messages.append({"role": role, "content": text(rng, _TURN_BYTES)})
        else:
            messages = [{"role": "user", "content": text(rng, size)}]
        number += 1
        yield json.dumps(
            {"model": "stub", "max_tokens": 8, "stream": True, "messages": messages}
        ).encode()


async def ask(stub: ext_proc.ExternalProcessorStub, body: bytes, unread: bool) -> float | None:
    """Send a request and its reply; return the seconds from last byte to pick; None if shed."""
    call = stub.Process()
    values = [HeaderValue(key=":path", raw_value=b"/v1/chat/completions")]
    if unread:
        values.append(HeaderValue(key="content-encoding", raw_value=b"br"))
    head = HttpHeaders(headers=HeaderMap(headers=values))
    await call.write(ProcessingRequest(request_headers=head, protocol_config=_CONFIG))
    starts = range(0, len(body), _CHUNK)
    for start in starts[:-1]:
        await call.write(
            ProcessingRequest(request_body=HttpBody(body=body[start : start + _CHUNK]))
        )
    last = HttpBody(body=body[starts[-1] :], end_of_stream=True)
    began = time.perf_counter()
    await call.write(ProcessingRequest(request_body=last))
    answer = await call.read()
    seconds = time.perf_counter() - began
    if answer.HasField("immediate_response"):
        assert answer.immediate_response.status.code == 429, answer
        await call.done_writing()
        return None
    left = len(body)
    while left:
        left -= len((await call.read()).request_body.response.body_mutation.streamed_response.body)
    values = [HeaderValue(key="content-type", raw_value=b"text/event-stream")]
    await call.write(
        ProcessingRequest(response_headers=HttpHeaders(headers=HeaderMap(headers=values)))
    )
    await call.read()
    await call.write(ProcessingRequest(response_body=HttpBody(body=_REPLY, end_of_stream=True)))
    await call.read()
    await call.done_writing()
    return seconds


def _timed(messages: list[ProcessingRequest], times: list[float]) -> tuple[Receive, Send]:
    """Return a stream's ends; `times` gets the CPU ms from its last byte to its pick."""
    left, began = iter(messages), [0.0]

    async def receive() -> ProcessingRequest | None:
        began[0] = time.process_time()
        return next(left, None)

    async def send(answer: ProcessingResponse) -> None:
        if answer.HasField("request_headers"):
            times.append(1e3 * (time.process_time() - began[0]))

    return receive, send


async def decisions(attach: list[str], kind: str, load: tuple[int, float, float]) -> str:
    """Drive a picker in this process; return a row of the CPU time of its decisions."""
    size, _, bar = load
    workers = [AttachedWorker.parse(text, number) for number, text in enumerate(attach)]
    serving = PickerServing(
        EppConfig(listen_port=0, plaintext=True), GatewayConfig(port=0, strict=False),
        ControlConfig(peer_reads=False), FleetSetup(workers=workers, tokenizer=str(_MODEL)),
    )  # fmt: skip
    await serving.start()
    while len(serving.plane_driver.upstreams) < len(workers):
        await asyncio.sleep(0.1)
    source = chats(kind, size, seed=size)
    times: list[float] = []
    path = HeaderMap(headers=[HeaderValue(key=":path", raw_value=b"/v1/chat/completions")])
    kinds = HeaderMap(headers=[HeaderValue(key="content-type", raw_value=b"text/event-stream")])
    warm_up = 2 * _SESSIONS
    for number in range(warm_up + 60):
        body = next(source)
        messages = [
            ProcessingRequest(request_headers=HttpHeaders(headers=path), protocol_config=_CONFIG),
            *(
                ProcessingRequest(
                    request_body=HttpBody(
                        body=body[start : start + _CHUNK], end_of_stream=start + _CHUNK >= len(body)
                    )
                )
                for start in range(0, len(body), _CHUNK)
            ),
            ProcessingRequest(response_headers=HttpHeaders(headers=kinds)),
            ProcessingRequest(response_body=HttpBody(body=_REPLY, end_of_stream=True)),
        ]
        await serving.picker.process(*_timed(messages, times if number >= warm_up else []))
    await serving.stop()
    return (
        f"{kind:9} {size // 1000:4} kB decision CPU p50 {statistics.median(times):6.2f} ms "
        f"(bar {bar:g})  p90 {sorted(times)[int(0.9 * len(times))]:6.2f} ms"
    )


def cpu_s(process: psutil.Process) -> float:
    """Return the CPU seconds of a process so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


async def measure(
    port: int, pid: int, kind: str, load: tuple[int, float, float], seconds: float, unread: bool
) -> str:
    """Load the picker by open loop; return a row of the table."""
    size, rate, bar = load
    source = chats(kind, size, seed=size)
    count = int(rate * seconds)
    bodies = [next(source) for _ in range(count + 2 * _SESSIONS)]
    server, client = psutil.Process(pid), psutil.Process()
    async with grpc.aio.insecure_channel(f"{LOOPBACK}:{port}") as channel:
        stub = ext_proc.ExternalProcessorStub(channel)
        for body in bodies[: 2 * _SESSIONS]:  # warm-up
            await ask(stub, body, unread)
        server_s, client_s, began = cpu_s(server), cpu_s(client), time.perf_counter()
        tasks = []
        for number, body in enumerate(bodies[2 * _SESSIONS :]):
            await asyncio.sleep(max(0.0, began + number / rate - time.perf_counter()))
            tasks.append(asyncio.create_task(ask(stub, body, unread)))
        done = await asyncio.gather(*tasks)
        took = time.perf_counter() - began
    server_ms = 1e3 * (cpu_s(server) - server_s) / count
    client_ms = 1e3 * (cpu_s(client) - client_s) / count
    times = sorted(1e3 * each for each in done if each is not None)
    p50, p99 = statistics.median(times), times[int(0.99 * len(times))]
    return (
        f"{kind:9} {size // 1000:4} kB {rate:5.0f}/s asked {len(times) / took:6.1f}/s done "
        f"{count - len(times)} shed   "
        f"p50 {p50:7.2f} ms (bar {bar:g})  p99 {p99:8.2f} ms   "
        f"CPU a request: picker {server_ms:6.2f} ms, client {client_ms:5.2f} ms"
    )


async def run(arguments: argparse.Namespace) -> None:
    """Start workers and picker, and print the table."""
    ports = free_ports(_WORKERS + 2)
    print(" ".join(f"{name}={value}" for name, value in machine().items()))
    with tempfile.TemporaryDirectory() as folder:
        servers = []
        for port in ports[:_WORKERS]:
            command = [sys.executable, "-m", "benchmarks.lib.stub_worker", str(port)]
            url = f"http://{LOOPBACK}:{port}"
            servers.append(Server(command, url=url, log=Path(folder, f"{port}.log")))
        picker = [
            sys.executable, "-m", "pigou", "epp", "--plaintext", "--port", str(ports[-1]),
            "--status-port", str(ports[-2]), "--tokenizer", str(_MODEL),
            *(f"--attach={server.url}" for server in servers),
        ]  # fmt: skip
        url = f"http://{LOOPBACK}:{ports[-2]}"
        servers.append(Server(picker, url=url, log=Path(folder, "epp.log")))
        try:
            for server in servers:
                server.wait_healthy(timeout_s=120.0)
            await asyncio.sleep(2.0)
            for load in LOADS:
                for kind in arguments.kinds:
                    print(await decisions([s.url for s in servers[:-1]], kind, load), flush=True)
                    if arguments.decisions:
                        continue
                    for unread in (False, True)[: 1 + arguments.hop]:
                        row = await measure(
                            ports[-1], servers[-1].pid, kind, load, arguments.seconds, unread
                        )
                        print(row + "  (unread)" * unread, flush=True)
        finally:
            for server in servers:
                server.stop()


def main() -> None:
    """Read the options, and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each load")
    parser.add_argument("--kinds", nargs="*", default=["sessions", "distinct"])
    parser.add_argument("--hop", action="store_true")
    parser.add_argument("--decisions", action="store_true", help="measure decisions alone")
    uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
