"""The paper's controller before a real Dynamo's mock workers, while load rises and falls.

``python -m benchmarks.routing.dynamo_regimes`` starts four mock workers and runs the same load
against each of three arrangements, one after the other:

| arrangement   | what stands before the workers                                               |
|---------------|------------------------------------------------------------------------------|
| `switch`      | three frontends at the table's settings, and the switch between them          |
| `dynamo-paper`| Pigou's gateway: Dynamo's cost (Eq. 1), parameters of the regime per request   |
| `toll`        | Pigou's gateway: private cost plus toll, no regime needed                      |

Clients are a closed loop: 2, then `--peak`, then 2 again. Every few seconds a line tells regime,
signal, temperature, where requests went, and for the gateway the Price of Anarchy and tolls. Which
worker served what comes from Dynamo's event plane, compared with what the replies say.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from benchmarks.lib.dynamo_mockers import NAME, Mockers, dynamo_home
from benchmarks.lib.servers import LOOPBACK, Server, free_ports, machine, unwind_on_terminate
from pigou_lab.dynamo_host.attribution import RequestLedger
from pigou_lab.dynamo_host.event_plane import EventPlane
from pigou_lab.routing_controllers import RegimeTable

ARRANGEMENTS = ("switch", "dynamo-paper", "toll")
_LINE = "{:>5} {:>7} {:>10} {:>8} {:>5} {:>20} {:>16} {:>9} {:>9} {:>6} {:>24}"


@dataclass
class Tally:
    """What clients saw."""

    ttfts: list[tuple[float, float]] = field(default_factory=list)
    truth: dict[str, int] = field(default_factory=dict)
    failed: int = 0
    tokens: int = 0

    def since(self, start: float) -> np.ndarray[Any, np.dtype[np.float64]]:
        """TTFTs of the streams that ended since, in seconds."""
        return np.array([ttft for at, ttft in self.ttfts if at >= start] or [np.nan])


class Clients:
    """A closed loop of streams whose prompts share prefixes; `wanted` sets their number."""

    def __init__(self, url: str, args: argparse.Namespace, tally: Tally) -> None:
        self.wanted = 0
        self._url = url + "/v1/completions"
        self._args = args
        self._tally = tally
        self._random = random.Random(args.seed)
        self._tasks: list[asyncio.Task[None]] = []
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    def turn(self, wanted: int) -> None:
        """Change the number of clients; those that leave finish their request."""
        self.wanted = wanted
        self._tasks = [task for task in self._tasks if not task.done()]
        for number in range(len(self._tasks), wanted):
            self._tasks.append(asyncio.create_task(self._client(number)))

    async def close(self) -> None:
        """Let every client finish."""
        self.turn(0)
        await asyncio.gather(*self._tasks)
        await self._session.close()

    async def _client(self, number: int) -> None:
        while number < self.wanted:
            try:
                await self._one()
            except (aiohttp.ClientError, OSError, ValueError) as error:
                self._tally.failed += 1
                print(f"a request failed: {error!r}", file=sys.stderr)
                await asyncio.sleep(0.2)

    async def _one(self) -> None:
        args, draw = self._args, self._random
        family = draw.randrange(args.families)
        prompt = [300 + family] * args.prefix
        prompt += [draw.randrange(300, 1200) for _ in range(args.suffix)]
        body = {
            "model": NAME, "prompt": prompt, "max_tokens": args.output, "stream": True,
            "ignore_eos": True, "nvext": {"extra_fields": ["worker_id"]},
        }  # fmt: skip
        began, first, name, done = time.monotonic(), 0.0, "", False
        async with self._session.post(self._url, json=body) as reply:
            if reply.status != 200:
                raise ValueError(f"{reply.status}: {(await reply.text())[:200]}")
            async for line in reply.content:
                if line == b"data: [DONE]\n":
                    done = True
                elif line.startswith(b"data: ") and not first:
                    first = time.monotonic()
                    chunk = json.loads(line[6:])
                    name = chunk["id"]
                    worker = chunk["nvext"]["worker_id"]["decode_worker_id"]
                self._tally.tokens += line.startswith(b"data: ")
        if not done:
            raise ValueError("the stream broke off")
        self._tally.ttfts.append((time.monotonic(), first - began))
        self._tally.truth[name] = int(worker)


def main() -> None:
    """Run the arrangements and print what they did."""
    args = _arguments()
    unwind_on_terminate()
    print("machine:", machine())
    summary = []
    for name in args.arrangement or ARRANGEMENTS:
        with tempfile.TemporaryDirectory() as folder:
            summary.append((name, asyncio.run(_arrangement(name, args, Path(folder)))))
    print()
    for name, told in summary:
        print(f"{name:>13}: {told}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arrangement", action="append", choices=ARRANGEMENTS)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--peak", type=int, default=128, help="clients at the peak")
    parser.add_argument("--phase", type=float, default=16.0, help="seconds of each phase")
    parser.add_argument("--every", type=float, default=4.0, help="seconds between lines")
    parser.add_argument("--max-num-seqs", type=int, default=8, help="of each mock worker")
    parser.add_argument("--speedup", type=float, default=2.0, help="of the mock workers")
    parser.add_argument("--families", type=int, default=6)
    parser.add_argument("--prefix", type=int, default=256, help="shared tokens")
    parser.add_argument("--suffix", type=int, default=64, help="tokens of its own")
    parser.add_argument("--output", type=int, default=32, help="tokens")
    parser.add_argument("--theta1", type=float, default=0.1, help="seconds of TTFT P99")
    parser.add_argument("--theta2", type=float, default=0.35, help="seconds of TTFT P99")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


async def _arrangement(name: str, args: argparse.Namespace, folder: Path) -> str:
    print(f"\n{name}")
    mocker = ["--max-num-seqs", str(args.max_num_seqs)]
    with contextlib.ExitStack() as stack:
        mockers = stack.enter_context(
            Mockers.start(
                dynamo_home(), folder / "dynamo", args.workers, speedup=args.speedup, mocker=mocker
            )
        )
        begin = _switch if name == "switch" else _gateway
        server, look = begin(name, mockers, args, folder)
        stack.enter_context(server)
        server.wait_healthy("/v1/models", 60)
        ledger = RequestLedger()
        async with EventPlane(ledger.take, folder=mockers.folder) as plane:
            await plane.settled()
            tally = await _load(server.url, args, look, ledger)
            await asyncio.sleep(1.0)
        return _summary(tally, ledger)


async def _load(
    url: str, args: argparse.Namespace, look: Callable[[Any], dict[str, str]], ledger: RequestLedger
) -> Tally:
    tally = Tally()
    clients = Clients(url, args, tally)
    print(_LINE.format("s", "clients", "regime", "signal", "tau", "to", "by worker",
                       "p50 ms", "p99 ms", "PoA", "tolls ms"))  # fmt: skip
    began = time.monotonic()
    seen: Counter[str] = Counter()
    try:
        for wanted in (2, args.peak, 2, 2):
            clients.turn(wanted)
            for _ in range(round(args.phase / args.every)):
                start = time.monotonic()
                before = Counter(ledger.counts())
                await asyncio.sleep(args.every)
                told = look(await _get(url))
                ttfts = tally.since(start) * 1e3
                shares = Counter(ledger.counts()) - before
                by_worker = "/".join(str(shares[each]) for each in sorted(ledger.counts()))
                seen[told["regime"]] += 1
                print(_LINE.format(
                    f"{time.monotonic() - began:.0f}", wanted, told["regime"], told["signal"],
                    told["tau"], told["to"], by_worker, f"{np.percentile(ttfts, 50):.0f}",
                    f"{np.percentile(ttfts, 99):.0f}", told["poa"], told["tolls"],
                ), flush=True)  # fmt: skip
    finally:
        await clients.close()
    return tally


async def _get(url: str) -> dict[str, Any]:
    async with aiohttp.ClientSession() as session:
        for path in ("/switch", "/workers"):
            async with session.get(url + path) as reply:
                if reply.status == 200:
                    found: dict[str, Any] = await reply.json()
                    return found
    raise RuntimeError(f"{url} tells no state")


def _switch(
    _: str, mockers: Mockers, args: argparse.Namespace, folder: Path
) -> tuple[Server, Callable[[Any], dict[str, str]]]:
    """Three frontends at the settings of the paper's table, and the switch."""
    table = RegimeTable()
    urls = {mockers.url: table.below}
    for row in (table.transition, table.saturated):
        frontend = mockers.frontend(
            "--router-temperature", str(row.temperature),
            "--router-prefill-load-scale", str(row.overlap_weight),
        )  # fmt: skip
        urls[frontend.url] = row
    port = free_ports(1)[0]
    argv = [sys.executable, "-m", "pigou_lab.dynamo_host", "switch", "--port", str(port)]
    for url, row in urls.items():
        argv += ["--frontend", f"{url},temperature={row.temperature},"
                               f"overlap-weight={row.overlap_weight}"]  # fmt: skip
    argv += ["--detector", _detector(args)]
    sent = [0] * len(urls)

    def look(state: Any) -> dict[str, str]:
        nonlocal sent
        now = [each["sent"] for each in state["frontends"]]
        fresh, sent = [a - b for a, b in zip(now, sent, strict=True)], now
        active = next(f for f in state["frontends"] if f["url"] == state["active"])
        return {
            "regime": state["regime"], "signal": _number(state["signal"]),
            "tau": f"{active['temperature']:g}", "to": "/".join(map(str, fresh)),
            "poa": "", "tolls": "",
        }  # fmt: skip

    return Server(argv, url=f"http://{LOOPBACK}:{port}", log=folder / "switch.log"), look


def _gateway(
    policy: str, mockers: Mockers, args: argparse.Namespace, folder: Path
) -> tuple[Server, Callable[[Any], dict[str, str]]]:
    """Pigou's gateway, with each mock worker pinned behind one frontend."""
    port = free_ports(1)[0]
    argv = [sys.executable, "-m", "pigou", "serve", "--port", str(port), "--policy", policy]
    argv += ["--detector", _detector(args)]
    argv += ["--controller", "regime"] if policy == "dynamo-paper" else []
    for pin in mockers.instances():
        argv += ["--attach", f"{mockers.url},pin={pin}"]

    def look(state: Any) -> dict[str, str]:
        game = state["game"]
        tolls = [1e3 * (each["toll"] or 0.0) for each in state["workers"]]
        return {
            "regime": str(game["regime"]), "signal": _number(game["signal"]),
            "tau": _number(game["temperature"]), "to": policy, "poa": _poa(game),
            "tolls": "/".join(f"{toll:.0f}" for toll in tolls),
        }  # fmt: skip

    return Server(argv, url=f"http://{LOOPBACK}:{port}", log=folder / "gateway.log"), look


def _detector(args: argparse.Namespace) -> str:
    # The paper polls every 5 s and asks for three polls in a row; here time runs faster.
    return (
        f"paper,theta1={args.theta1},theta2={args.theta2},margin={0.1 * args.theta1},"
        "interval=1000000000,consecutive=2,idle=8000000000"
    )


def _poa(game: Any) -> str:
    found = game["poa"]
    return "" if found is None else _number(found["whole"]["value"])


def _number(value: Any) -> str:
    return "" if value is None else f"{float(value):.2f}"


def _summary(tally: Tally, ledger: RequestLedger) -> str:
    match = ledger.match(tally.truth)
    agree = sum(
        found is not None and found.worker == worker
        for found, worker in ((ledger.get(each), worker) for each, worker in tally.truth.items())
    )
    return (
        f"{len(tally.ttfts)} streams, {tally.failed} failed, {match.matched} attributed from the "
        f"event plane ({match.share:.1%}), {agree} as the replies say, "
        f"{ledger.missed} messages lost"
    )


if __name__ == "__main__":
    main()
