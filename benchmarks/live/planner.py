"""A planner on a live fleet: load rises fourfold, turns from prompts to outputs, and falls again.

``python -m benchmarks.live.planner`` starts ``pigou serve --planner``, whose workers sleep in place
of computing, and sends it requests at random times. Every reply is compared with the one that the
same prompt got before the load. Meanwhile a worker that starts and one that drains are killed
(``--kills``), and the gateway at the end. Printed: workers of each pool and attainment over time,
the planner's decisions, streams that were lost or changed, and whether the journal replays.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import aiohttp

from benchmarks.lib.servers import (
    LOOPBACK,
    Server,
    free_ports,
    machine,
    unwind_on_terminate,
)

#: Prompts, each with one right reply for each number of tokens.
_PROMPTS = 16
#: Options of a mock worker: 20 ms a step, 2 ms more per stream, 2,000 prompt tokens a second.
WORKER = ("--executor", "sleep", "--sleep-base", "20000000", "--sleep-per-seq", "2000000",
           "--sleep-prefill-rate", "2000", "--repeat", "1")  # fmt: skip
_TEXT_ROUTE = "/v1/completions"
#: Seconds in which workers end whose gateway was killed.
_ORPHAN_S = 5.0


class Phase(NamedTuple):
    """Requests of one kind, for some seconds."""

    seconds: float
    rps: float
    words: int
    output_tokens: int


@dataclass
class Outcome:
    """What came of the load.

    `lost` streams broke off or were refused, `changed` ones had another text than before.
    """

    sent: int = 0
    lost: int = 0
    changed: int = 0
    inside: int = 0
    ttft_s: list[float] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    killed: dict[str, str] = field(default_factory=dict)

    @property
    def attained(self) -> float:
        """Share of sent requests that were inside the objective."""
        return self.inside / max(self.sent, 1)


class Load:
    """Sends requests at random times and compares their replies with the right ones."""

    def __init__(
        self, url: str, phases: Sequence[Phase], slo: tuple[float, float], seed: int
    ) -> None:
        self.outcome = Outcome()
        self._url, self._phases, self._seed = url, tuple(phases), seed
        self._ttft_s, self._itl_s = slo
        self._right: dict[tuple[int, int, int], str] = {}

    async def run(self) -> None:
        """Learn the right replies, then send all phases."""
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            kinds = dict.fromkeys((phase.words, phase.output_tokens) for phase in self._phases)
            for words, tokens in kinds:
                for number in range(_PROMPTS):
                    text, _, _ = await self._ask(session, number, words, tokens)
                    self._right[number, words, tokens] = text
            await self._send(session)

    async def _send(self, session: aiohttp.ClientSession) -> None:
        rng, tasks = Random(self._seed), []
        for phase in self._phases:
            end_s = time.monotonic() + phase.seconds
            while (left_s := end_s - time.monotonic()) > 0:
                await asyncio.sleep(min(rng.expovariate(phase.rps), left_s))
                if time.monotonic() < end_s:
                    number = rng.randrange(_PROMPTS)
                    request = self._judge(session, number, phase.words, phase.output_tokens)
                    tasks.append(asyncio.create_task(request))
        await asyncio.gather(*tasks)

    async def _judge(
        self, session: aiohttp.ClientSession, number: int, words: int, tokens: int
    ) -> None:
        outcome = self.outcome
        outcome.sent += 1
        try:
            text, ttft_s, itl_s = await self._ask(session, number, words, tokens)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            outcome.lost += 1
            outcome.reasons.append(f"{type(error).__name__}: {error}")
            return
        outcome.ttft_s.append(ttft_s)
        outcome.inside += ttft_s <= self._ttft_s and itl_s <= self._itl_s
        outcome.changed += text != self._right[number, words, tokens]

    async def _ask(
        self, session: aiohttp.ClientSession, number: int, words: int, tokens: int
    ) -> tuple[str, float, float]:
        """Return text, seconds to the first token, and mean seconds between tokens."""
        body = {
            "prompt": f"Story {number}: " + "word " * words, "max_tokens": tokens,
            "temperature": 0, "ignore_eos": True, "stream": True,
            "cache_salt": secrets.token_hex(8),  # every prompt is computed
        }  # fmt: skip
        began, first, last, parts = time.monotonic(), 0.0, 0.0, []
        async with session.post(self._url + _TEXT_ROUTE, json=body) as response:
            if response.status != 200:
                raise ValueError(f"{response.status}: {(await response.text())[:200]}")
            async for line in response.content:
                data = line.decode().strip().removeprefix("data: ")
                if data == "[DONE]":
                    break
                if data:
                    chunk = json.loads(data)
                    if "error" in chunk:
                        raise ValueError(str(chunk["error"])[:200])
                    last = time.monotonic()
                    first = first or last
                    parts += [choice["text"] for choice in chunk["choices"]]
            else:
                raise ValueError("the stream broke off")
        return "".join(parts), first - began, (last - first) / max(tokens - 1, 1)


async def kill_one(url: str, state: str, outcome: Outcome) -> None:
    """Kill -9 the next local worker that is in a state, once."""
    async with aiohttp.ClientSession() as session:
        while state not in outcome.killed:
            await asyncio.sleep(0.1)
            with suppress(aiohttp.ClientError):
                async with session.get(url + "/workers") as response:
                    for row in (await response.json())["workers"]:
                        if row["state"] == state and row["pid"]:
                            os.kill(row["pid"], signal.SIGKILL)
                            outcome.killed[state] = row["id"]
                            break


async def measure(
    url: str, phases: Sequence[Phase], slo: tuple[float, float], kills: Sequence[str], seed: int,
    settle_s: float,
) -> tuple[Outcome, dict[str, Any], dict[str, Any]]:  # fmt: skip
    """Load the fleet; return what came of it, the plan and the metrics at the end."""
    load = Load(url, phases, slo, seed)
    killers = [asyncio.create_task(kill_one(url, state, load.outcome)) for state in kills]
    await load.run()
    await asyncio.sleep(settle_s)
    for task in killers:
        task.cancel()
    await asyncio.gather(*killers, return_exceptions=True)
    async with aiohttp.ClientSession() as session:
        plan = await (await session.get(url + "/plan")).json()
        workers = await (await session.get(url + "/workers")).json()
    return load.outcome, plan, workers


def serve_arguments(args: argparse.Namespace, port: int, journal: Path) -> list[str]:
    """Return the command line of the gateway."""
    prefill, decode, both = args.fleet
    return [
        sys.executable, "-m", "pigou", "serve", "--port", str(port),
        "--prefill", str(prefill), "--decode", str(decode), "--both", str(both),
        "--slo", f"ttft={args.ttft},itl={args.itl}", "--planner", args.planner,
        "--max-workers", str(args.max_workers), "--planner-interval", str(args.interval),
        *(["--start-up", str(args.start_up)] if args.start_up else []),
        "--journal", str(journal), "--", *WORKER,
    ]  # fmt: skip


def replay(journal: Path) -> tuple[bool, int, int]:
    """Replay the journal; return whether all is the same, and windows and entries."""
    figures = journal.with_suffix(".json")
    command = [sys.executable, "-m", "pigou", "replay", str(journal), "--json", str(figures)]
    subprocess.run(command, check=False, stdout=subprocess.DEVNULL)
    document = json.loads(figures.read_text())
    return bool(document["same"]), document["planner_windows"], document["entries"]


def show(outcome: Outcome, plan: dict[str, Any], args: argparse.Namespace) -> None:
    """Print replicas and attainment over time, decisions and figures."""
    series = plan["series"]
    start = series["time"][0] if series["time"] else 0.0
    names = list(series["pools"])
    print("\n    s    rps planned  attained  " + "  ".join(f"{name:<14}" for name in names))
    for index in range(0, len(series["time"]), args.every):
        pools = []
        for name in names:
            states = series["pools"][name]
            counts = (states[state][index] for state in ("ready", "starting", "draining"))
            bar = "".join(mark * count for mark, count in zip("#+-", counts, strict=True))
            pools.append(f"{bar:<14}")
        attained = series["attained"][index]
        print(
            f"{series['time'][index] - start:5.0f} {series['rps'][index] or 0.0:6.1f} "
            f"{series['planned_rps'][index] or 0.0:7.1f}  "
            f"{'     -  ' if attained is None else f'{attained:8.1%}'}  " + "  ".join(pools)
        )
    print("# ready, + starting, - draining\n")
    for decision in plan["decisions"]:
        actions = ", ".join(" ".join(map(str, action.values())) for action in decision["actions"])
        print(f"{decision['time'] - start:5.0f}  {actions}  {'; '.join(decision['refused'])}")
    print(
        f"\nsent {outcome.sent}, lost {outcome.lost}, changed {outcome.changed}, "
        f"attained {outcome.attained:.1%}, killed {outcome.killed or 'nobody'}"
    )
    print(f"moves {plan['moves']}, failures of the planner {plan['failures']}")
    for reason in dict.fromkeys(outcome.reasons):
        print(f"lost: {reason}")


def main() -> None:
    """Run the benchmark and print its figures."""
    args = _arguments()
    unwind_on_terminate()
    print("machine:", machine())
    low, high, long = args.rate, 4 * args.rate, args.seconds
    phases = (
        Phase(long / 2, low, 60, 40),
        Phase(long, high, 480, 10),
        Phase(long, high, 60, 60),
        Phase(2 * long, low, 60, 40),
    )
    (port,) = free_ports(1)
    url = f"http://{LOOPBACK}:{port}"
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "journal.jsonl"
        command = serve_arguments(args, port, journal)
        with Server(command, url=url, log=Path(folder) / "gateway.log") as gateway:
            gateway.wait_healthy()
            kills = ("starting", "draining") if args.kills else ()
            outcome, plan, workers = asyncio.run(
                measure(url, phases, (args.ttft, args.itl), kills, args.seed, args.interval)
            )
            if args.kills:
                pids = [row["pid"] for row in workers["workers"] if row["pid"]]
                os.kill(gateway.pid, signal.SIGKILL)
                time.sleep(_ORPHAN_S)
                left = sum(Path(f"/proc/{pid}/cmdline").exists() for pid in pids)
                print(f"{left} of {len(pids)} workers outlived the gateway that was killed")
        show(outcome, plan, args)
        same, windows, entries = replay(journal)
        print(f"journal: {entries} entries, {windows} windows of the planner, "
              f"{'the same' if same else 'OTHER'} decisions")  # fmt: skip
        if args.journal:
            Path(args.journal).write_bytes(journal.read_bytes())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--planner", default="price,hold_s=15")
    parser.add_argument("--fleet", type=_fleet, default=(1, 1, 0), help="1p+1d or 1xboth")
    parser.add_argument("--max-workers", type=int, default=7)
    parser.add_argument("--interval", type=float, default=2.0, help="seconds between decisions")
    parser.add_argument("--start-up", type=float, default=20.0, help="that the planner expects")
    parser.add_argument("--rate", type=float, default=2.0, help="requests a second, low load")
    parser.add_argument("--seconds", type=float, default=40.0, help="of each phase of high load")
    parser.add_argument("--ttft", type=float, default=1.0)
    parser.add_argument("--itl", type=float, default=0.06)
    parser.add_argument("--kills", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--every", type=int, default=1, help="windows from one line to the next")
    parser.add_argument("--journal", default="", help="file that the journal is copied to")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def _fleet(text: str) -> tuple[int, int, int]:
    if text.endswith("xboth"):
        return 0, 0, int(text.removesuffix("xboth"))
    prefill, decode = text.split("+")
    return int(prefill.removesuffix("p")), int(decode.removesuffix("d")), 0


if __name__ == "__main__":
    main()
