"""Attacks of one tenant on a live fleet, by admission order: what three victims feel of them.

``python -m benchmarks.live.attacks`` starts workers with the bundled model, and a gateway with each
order before them. Victims send at a rate; the attacker keeps a number of requests open, in all
plays as many. Printed: the victims' TTFT P99 over honest play's, their answers within the
objective (2 s) likewise, output tokens of the attacker's jobs likewise, and refused attempts.

| play | the attacker sends |
|---|---|
| honest | what victims send |
| cache-flood | long prompts that nobody sent before, one output token |
| cost-bomb | an agent's turns, each with all before it, and long outputs |
| sybil, sybil-paid | honest requests under eight keys; in the second they have one payer |
| retry-storm | honest requests, given up after `PATIENCE_S` and sent again at once |
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from random import Random

import aiohttp
import numpy as np

from benchmarks.lib.servers import LOOPBACK, Server, free_ports, machine, unwind_on_terminate
from benchmarks.live.routing import fleet

VICTIMS = ("v0", "v1", "v2")
PLAYS = ("honest", "cache-flood", "cost-bomb", "sybil", "sybil-paid", "retry-storm")
SYBILS, PATIENCE_S, TTFT_SLO_S = 8, 2.0, 2.0
#: Tokens of an honest prompt that its tenant's requests share, own ones, and output.
SHARED, OWN, OUTPUT = 256, 32, 32
LONG, TURN, TURNS = 1024, 128, 6


@dataclass
class Figures:
    """What a play came to."""

    ttfts: list[float] = field(default_factory=list)  # seconds, of victims; waits of failed ones
    good: int = 0
    tokens: int = 0  # output of the attacker's jobs
    attempts: int = 0
    refused: int = 0  # attempts with 429 or 503


@dataclass
class Session:
    """A gateway under attack."""

    http: aiohttp.ClientSession
    url: str
    rng: Random
    end: float
    figures: Figures = field(default_factory=Figures)

    async def send(self, key: str, prompt: list[int], output: int) -> tuple[float, int]:
        """Return TTFT in seconds and output tokens; raise `ConnectionError` if refused."""
        body = {"prompt": prompt, "max_tokens": output, "stream": True, "ignore_eos": True}
        headers, began, first, tokens = {"authorization": f"Bearer {key}"}, time.monotonic(), 0.0, 0
        async with self.http.post(f"{self.url}/v1/completions", json=body, headers=headers) as got:
            if got.status != 200:
                raise ConnectionError(got.status)
            async for line in got.content:
                if line.startswith(b"data: {"):
                    first = first or time.monotonic() - began
                    tokens += 1
        return first, tokens

    def prompt(self, scope: int, length: int, own: int) -> list[int]:
        """Return a scope's shared tokens, and own ones."""
        shared = Random(scope)
        head = [shared.randrange(100, 1000) for _ in range(length)]
        return head + [self.rng.randrange(100, 1000) for _ in range(own)]

    async def victim(self, name: str, rate: float) -> None:
        """Send at a rate until the end."""
        rng, sent, at = Random(name), list[asyncio.Task[None]](), time.monotonic()
        while (at := at + rng.expovariate(rate)) < self.end:
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            sent.append(asyncio.create_task(self._serve(name, at)))
        await asyncio.gather(*sent)

    async def _serve(self, name: str, intended: float) -> None:
        while True:
            late = time.monotonic() - intended
            try:
                first, _ = await self.send(key(name), self.prompt(len(name), SHARED, OWN), OUTPUT)
            except ConnectionError:
                if time.monotonic() < self.end:
                    await asyncio.sleep(1.0)
                    continue
                first = 0.0
            self.figures.good += 0.0 < late + first <= TTFT_SLO_S
            self.figures.ttfts.append(late + first if first else self.end - intended)
            return

    async def attacker(self, play: str, number: int) -> None:
        """Keep one request open until the end."""
        own, turn = "x", 0
        if play.startswith("sybil"):
            own = f"{'y' if play == 'sybil-paid' else 'x'}{number % SYBILS}"
        while time.monotonic() < self.end:
            prompt, output = self.prompt(1000, SHARED, OWN), OUTPUT
            if play == "cache-flood":
                prompt, output = self.prompt(0, 0, LONG), 1
            elif play == "cost-bomb":
                turn = turn % TURNS + 1
                prompt, output = self.prompt(2000 + number, TURN * turn, 1), 4 * OUTPUT
            patience = PATIENCE_S if play == "retry-storm" else None
            self.figures.attempts += 1
            try:
                async with asyncio.timeout(patience):
                    _, tokens = await self.send(key(own), prompt, output)
                self.figures.tokens += tokens * (play not in ("cache-flood", "cost-bomb"))
            except ConnectionError:
                self.figures.refused += 1
                await asyncio.sleep(0.02 if play == "retry-storm" else 1.0)
            except TimeoutError:
                pass


def key(name: str) -> str:
    """Return the API key of a name."""
    return f"pigou-benchmark-{name}"


def keys_file() -> str:
    """Return a keys file of victims and attacker, whose keys `y` have one payer."""
    names = dict.fromkeys((*VICTIMS, "x", *(f"x{n}" for n in range(SYBILS))), "")
    names |= {f"y{n}": "x" for n in range(SYBILS)}
    rows = [
        {"tenant": name, "sha256": sha256(key(name).encode()).hexdigest(), "payer": payer}
        for name, payer in names.items()
    ]
    return json.dumps({"keys": rows})


async def play_once(url: str, play: str, args: argparse.Namespace) -> Figures:
    """Run one play against a gateway."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http:
        session = Session(http, url, Random(args.seed), time.monotonic() + args.seconds)
        await asyncio.gather(
            *(session.victim(name, args.rate) for name in VICTIMS),
            *(session.attacker(play, number) for number in range(args.open)),
        )
        return session.figures


def main() -> None:
    """Run the benchmark and print its table."""
    args = _arguments()
    unwind_on_terminate()
    print("machine:", machine())
    print(f"{'order':10}{'play':13}{'TTFT P99 s':>11}{'ratio':>7}{'goodput':>9}{'gain':>7}"
          f"{'attempts':>10}{'refused':>9}")  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, fleet(args, Path(folder)) as workers:
        for order in args.order:
            _show(order, attacked(args, order, workers, Path(folder)))


def attacked(
    args: argparse.Namespace, order: str, workers: Sequence[str], folder: Path
) -> dict[str, Figures]:
    """Put a gateway with this order before the workers, and play all."""
    path = folder / "keys.json"
    path.write_text(keys_file())
    (port,) = free_ports(1)
    argv = [sys.executable, "-m", "pigou", "serve", "--port", str(port), "--admission", order,
            "--api-keys-file", str(path), "--max-queued", str(args.open),
            "--max-inflight", str(args.inflight)]  # fmt: skip
    for worker in workers:
        argv += ["--attach", worker]
    url = f"http://{LOOPBACK}:{port}"
    with Server(argv, url=url, log=folder / "gateway.log") as gateway:
        gateway.wait_healthy()
        warm = argparse.Namespace(**{**vars(args), "seconds": args.seconds / 2})
        asyncio.run(play_once(url, "honest", warm))
        return {play: asyncio.run(play_once(url, play, args)) for play in args.play}


def _show(order: str, figures: dict[str, Figures]) -> None:
    honest = figures["honest"]
    for play, one in figures.items():
        p99, before = np.percentile(one.ttfts, 99), np.percentile(honest.ttfts, 99)
        good = (one.good / len(one.ttfts)) / max(honest.good / len(honest.ttfts), 1e-9)
        gain = one.tokens / max(1, honest.tokens)
        print(f"{order.partition(',')[0]:10}{play:13}{p99:11.3f}{p99 / before:7.2f}{good:9.2f}"
              f"{gain:7.2f}{one.attempts:10}{one.refused:9}", flush=True)  # fmt: skip


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--order", action="append", default=None)
    parser.add_argument("--play", action="append", default=None, choices=PLAYS[1:])
    parser.add_argument("--rate", type=float, default=2.0, help="of a victim, a second")
    parser.add_argument("--open", type=int, default=16, help="requests of the attacker at once")
    parser.add_argument("--inflight", type=int, default=4, help="streams of a worker")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--timing", default="", help="workers sleep by it, and compute nothing")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.order = args.order or ["fcfs", "fair,credit=1024", "drf,credit=0.25", "market,credit=0.25"]
    args.play = ["honest", *(args.play or PLAYS[1:])]
    args.fleet, args.model, args.blocks, args.block_size = "2both", "", 600, 16
    return args


if __name__ == "__main__":
    main()
