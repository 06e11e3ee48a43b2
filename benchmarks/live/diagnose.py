"""Failure modes made on real processes: a gateway and its workers, diagnosed by their URL.

``python -m benchmarks.live.diagnose`` starts `pigou serve` with workers that sleep by a law, makes
one fault after another while `pigou diagnose URL` watches, and prints what it reported.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from benchmarks.lib.servers import LOOPBACK, Server, free_ports, machine
from pigou.diagnosis.diagnose import diagnose
from pigou.gateway.auth.keys import make_key
from pigou.workload.fleet_scraper import scraped_windows

LAW = "law:itl_a=0.03,itl_b=0.0005,prefill=0.01,prefill_token=0.00005"
#: Names of the tenants; the last is the administrator.
TENANTS = ("anna", "bert", "boss")


@dataclass
class LiveFleet:
    """A gateway that serves, and its tenants' keys."""

    url: str
    keys: dict[str, str]
    session: aiohttp.ClientSession
    seconds: float
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    sent: list[asyncio.Task[None]] = field(default_factory=list)

    def prompt(self, tokens: int, shared: int = 0) -> list[int]:
        """Return token ids: the first `shared` are those of all prompts."""
        new = [self.rng.randrange(300, 500) for _ in range(tokens - shared)]
        return [300 + at % 100 for at in range(shared)] + new

    async def complete(
        self, prompt: list[int], output: int, *, tenant: str = "anna", timeout_s: float = 300.0,
        read: bool = True,
    ) -> bool:  # fmt: skip
        """Send one request; return whether it was served."""
        body = {"prompt": prompt, "max_tokens": output, "stream": True, "ignore_eos": True}
        headers = {"authorization": f"Bearer {self.keys[tenant]}"}
        try:
            async with self.session.post(
                f"{self.url}/v1/completions", json=body, headers=headers,
                timeout=aiohttp.ClientTimeout(total=timeout_s),
            ) as reply:  # fmt: skip
                if not read:
                    await asyncio.sleep(timeout_s)
                async for _ in reply.content:
                    pass
                return reply.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    async def poisson(self, rate: float, send: Callable[[], Awaitable[object]]) -> None:
        """Send at random times until cancelled."""
        while True:
            await asyncio.sleep(self.rng.expovariate(rate))
            self.sent.append(asyncio.ensure_future(_quiet(send())))


async def _quiet(call: Awaitable[object]) -> None:
    await call


Fault = Callable[[LiveFleet], Awaitable[None]]


async def out_of_memory(fleet: LiveFleet) -> None:
    """A worker is killed as the kernel kills one that is out of memory."""
    load = asyncio.ensure_future(fleet.poisson(1.0, lambda: fleet.complete(fleet.prompt(100), 20)))
    await asyncio.sleep(fleet.seconds / 3)
    headers = {"authorization": f"Bearer {fleet.keys['boss']}"}
    async with fleet.session.get(f"{fleet.url}/workers", headers=headers) as reply:
        os.kill((await reply.json())["workers"][0]["pid"], signal.SIGKILL)
    await load


async def kv_exhaustion(fleet: LiveFleet) -> None:
    """Sequences grow past a small pool."""
    await asyncio.gather(*(_closed(lambda: fleet.complete(fleet.prompt(64), 300))
                           for _ in range(24)))  # fmt: skip


async def miss_storm(fleet: LiveFleet) -> None:
    """From the middle on every prompt begins with something new."""
    begin = time.monotonic()

    async def send() -> None:
        late = time.monotonic() - begin > fleet.seconds / 2
        await fleet.complete(fleet.prompt(1000, 0 if late else 960), 8)

    await fleet.poisson(2.0, send)


async def queue_build_up(fleet: LiveFleet) -> None:
    """Twice as many come as are served."""
    await fleet.poisson(8.0, lambda: fleet.complete(fleet.prompt(100), 40))


async def prefill_spikes(fleet: LiveFleet) -> None:
    """Long prompts are computed in one step beside streams."""
    streams = [_closed(lambda: fleet.complete(fleet.prompt(50), 200)) for _ in range(6)]
    longs = fleet.poisson(1.0, lambda: fleet.complete(fleet.prompt(6000), 4))
    await asyncio.gather(*streams, longs)


async def noisy_neighbour(fleet: LiveFleet) -> None:
    """One tenant keeps forty streams open; another waits."""
    loud = [_closed(lambda: fleet.complete(fleet.prompt(100), 60)) for _ in range(40)]
    quiet = fleet.poisson(1.0, lambda: fleet.complete(fleet.prompt(100), 8, tenant="bert"))
    await asyncio.gather(*loud, quiet)


async def head_of_line(fleet: LiveFleet) -> None:
    """Every fourth part of the time a prompt of 50,000 tokens is computed before all others."""
    shorts = fleet.poisson(3.0, lambda: fleet.complete(fleet.prompt(100), 4))

    async def longs() -> None:
        while True:
            await asyncio.sleep(fleet.seconds / 4)
            await fleet.complete(fleet.prompt(50_000), 1)

    await asyncio.gather(shorts, longs())


async def starvation(fleet: LiveFleet) -> None:
    """Short prompts go first, always, and are more than a worker serves."""
    shorts = [_closed(lambda: fleet.complete(fleet.prompt(100), 20)) for _ in range(30)]
    longs = fleet.poisson(0.5, lambda: fleet.complete(fleet.prompt(4000), 20))
    await asyncio.gather(*shorts, longs)


async def retry_storm(fleet: LiveFleet) -> None:
    """Clients give up after two seconds, and send the same again."""

    async def send() -> None:
        prompt = fleet.prompt(100)
        for _ in range(6):
            if await fleet.complete(prompt, 40, timeout_s=2.0):
                return

    await fleet.poisson(4.0, send)


async def engine_stall(fleet: LiveFleet) -> None:
    """A worker's process stops for three seconds, twice."""
    streams = [_closed(lambda: fleet.complete(fleet.prompt(50), 100)) for _ in range(4)]
    load = asyncio.gather(*streams)
    headers = {"authorization": f"Bearer {fleet.keys['boss']}"}
    for _ in range(2):
        await asyncio.sleep(fleet.seconds / 4)
        async with fleet.session.get(f"{fleet.url}/workers", headers=headers) as reply:
            pid = (await reply.json())["workers"][0]["pid"]
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(3.0)
        os.kill(pid, signal.SIGCONT)
    await load


async def healthy(fleet: LiveFleet) -> None:
    """A load that the fleet carries."""
    await fleet.poisson(1.0, lambda: fleet.complete(fleet.prompt(100, 64), 40))


async def _closed(send: Callable[[], Awaitable[object]]) -> None:
    while True:
        await send()
        await asyncio.sleep(0.01)


#: Name -> number of the mode (0: none), the fault, options of the gateway and of its workers.
FAULTS: dict[str, tuple[int, Fault, str, str]] = {
    "healthy": (0, healthy, "", ""),
    "out_of_memory": (1, out_of_memory, "", ""),
    "kv_exhaustion": (2, kv_exhaustion, "--max-inflight 24 --max-inflight-tokens 100000",
                      "--blocks 120 --max-model-len 1024"),
    "miss_storm": (4, miss_storm, "", ""),
    "queue_build_up": (6, queue_build_up, "--max-inflight 6", ""),
    "prefill_spikes": (7, prefill_spikes, "", "--max-batched-tokens 8192 --max-model-len 8192"),
    "head_of_line": (8, head_of_line, "", "--max-model-len 65536 --blocks 8192"),
    "starvation": (9, starvation, "--max-inflight 6 --admission shortest,ageing=1", ""),
    "noisy_neighbour": (11, noisy_neighbour, "--max-inflight 8", ""),
    "retry_storm": (12, retry_storm, "--max-inflight 4", ""),
    "engine_stall": (13, engine_stall, "", ""),
}  # fmt: skip


async def trial(name: str, seconds: float, folder: Path) -> str:
    """Make one fault; return what was reported."""
    number, fault, gateway, worker = FAULTS[name]
    made = {tenant: make_key(tenant, admin=tenant == "boss") for tenant in TENANTS}
    keys = folder / "keys"
    keys.write_text("".join(line + "\n" for _, line in made.values()))
    (port,) = free_ports(1)
    url = f"http://{LOOPBACK}:{port}"
    argv = [
        sys.executable, "-m", "pigou", "serve", "--port", str(port), "--timing", LAW,
        "--prefill", "0", "--decode", "0", "--both", "1", "--api-keys-file", str(keys),
        *gateway.split(), "--", *(worker or "--max-model-len 8192").split(),
    ]  # fmt: skip
    with Server(argv, url=url, log=folder / f"{name}.log") as server:
        server.wait_healthy()
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            fleet = LiveFleet(url, {t: key for t, (key, _) in made.items()}, session, seconds)
            await fleet.complete(fleet.prompt(50), 4)
            load = asyncio.ensure_future(fault(fleet))
            windows = await scraped_windows(url, fleet.keys["boss"], seconds)
            for task in (load, *fleet.sent):
                task.cancel()
            await asyncio.gather(load, *fleet.sent, return_exceptions=True)
    found = diagnose(windows).findings
    causes = [finding.number for finding in found if not finding.follows_from]
    rows = [f"{name} ({number}): reported {causes or 'nothing'}"]
    for finding in found:
        figures = "; ".join(f"{e.name} {e.value:.3g} {e.unit}".strip() for e in finding.evidence)
        follows = f" (follows from {finding.follows_from})" if finding.follows_from else ""
        rows.append(f"  {finding.number} {finding.mode}{follows}: {figures}")
    return "\n".join(rows)


def main() -> None:
    """Make the faults one after another."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--faults", nargs="*", choices=list(FAULTS), default=list(FAULTS))
    args = parser.parse_args()
    print("machine:", machine())
    with tempfile.TemporaryDirectory() as folder:
        for name in args.faults:
            print(asyncio.run(trial(name, args.seconds, Path(folder))), flush=True)


if __name__ == "__main__":
    main()
