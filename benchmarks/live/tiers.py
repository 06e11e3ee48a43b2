"""Sessions of many turns on one worker whose device is too small for them: with tiers, and without.

    python -m benchmarks.live.tiers [--rounds 3] [--sessions 16] [--turns 12] [--blocks 256]
        [--host-cache 128MiB] [--disk-cache 0]

Both ways run the bundled model with the same device blocks; one has host memory (and a disk) for
what leaves them. Sessions take turns at random; each turn sends the whole history and some more,
and gets an answer. Every turn is asked of both ways, one after the other, so that both see the same
machine, and answers are compared token by token. (With bf16, rounding depends on where a prompt is
cut into chunks, by any kind of cache: answers are compared with fp32.) Printed: TTFT of each way,
and the ratio of the medians with its bootstrap interval, in all and by depth (tokens of the
prompt); then hits after `kill -9` and a new start.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.lib.servers import LOOPBACK, Server, free_ports, machine

#: Tokens that a session may have in all: the bundled model's context.
CONTEXT = 2048
BUCKETS = (0, 256, 512, 768, 1024, 1280, 1536, 1792, 2048)


@dataclass(frozen=True)
class Turn:
    """One reply: tokens of the prompt, of those cached, seconds to the first token, the answer."""

    prompt: int
    cached: int
    ttft: float
    answer: tuple[int, ...]


@dataclass
class Session:
    """A conversation, as token ids; equal in both ways."""

    tokens: list[int] = field(default_factory=list)


@dataclass
class Way:
    """A worker and what it did."""

    name: str
    server: Server
    turns: list[Turn] = field(default_factory=list)


def start(name: str, options: Sequence[str], folder: Path) -> Server:
    """Start a worker of the bundled model."""
    port = free_ports(1)[0]
    argv = [
        sys.executable, "-m", "pigou", "worker", "--host", LOOPBACK, "--port", str(port),
        "--threads", "1", *options,
    ]  # fmt: skip
    server = Server(argv, url=f"http://{LOOPBACK}:{port}", log=folder / f"{name}.log")
    server.wait_healthy(timeout_s=120)
    return server


def ask(url: str, tokens: list[int], most: int) -> Turn:
    """Send a prompt, streamed; return what came."""
    body = {
        "model": "pigou-tiny", "prompt": tokens, "max_tokens": most, "temperature": 0,
        "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }  # fmt: skip
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    began = time.perf_counter()
    first = 0.0
    answer: list[int] = []
    usage: dict[str, object] = {}
    with urllib.request.urlopen(request, timeout=120) as reply:
        for line in reply:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            for choice in chunk["choices"]:
                first = first or time.perf_counter() - began
                answer += choice.get("token_ids") or []
            usage = chunk.get("usage") or usage
    details = usage["prompt_tokens_details"]
    cached = details.get("cached_tokens", 0) if isinstance(details, dict) else 0
    return Turn(len(tokens), int(cached or 0), first, tuple(answer))


def play(ways: Sequence[Way], args: argparse.Namespace, seed: int) -> int:
    """Play sessions on all ways, turn by turn; return how many answers differ."""
    rng = random.Random(seed)
    sessions = [Session() for _ in range(args.sessions)]
    wrong = 0
    order = [s for s in range(args.sessions) for _ in range(args.turns)]
    rng.shuffle(order)
    for number, which in enumerate(order):
        tokens = sessions[which].tokens
        more = rng.randint(args.least, args.most)
        if len(tokens) + more + args.answer > CONTEXT:
            tokens.clear()  # the session is over; another one begins
        tokens += [rng.randrange(5, 400) for _ in range(more)]
        turns = []
        for way in ways if number % 2 else reversed(ways):
            turn = ask(way.server.url, tokens, args.answer)
            way.turns.append(turn)
            turns.append(turn)
        wrong += turns[0].answer != turns[1].answer
        tokens += turns[0].answer
    return wrong


def interval(plain: list[float], tiered: list[float]) -> tuple[float, float, float]:
    """Return the ratio of the medians, and its bootstrap interval of 95%."""
    rng = np.random.default_rng(0)
    a, b = np.array(plain), np.array(tiered)
    index = rng.integers(0, len(a), (2000, len(a)))
    ratios = np.median(b[index], axis=1) / np.median(a[index], axis=1)
    low, high = np.quantile(ratios, (0.025, 0.975))
    return float(np.median(b) / np.median(a)), float(low), float(high)


def report(console: Console, plain: Way, tiered: Way) -> None:
    """Print TTFT by depth."""
    table = Table("prompt", "turns", "cached, plain", "tiers", "TTFT P50 plain, ms", "tiers, ms",
                  "ratio (95%)", "ratio of P95")  # fmt: skip
    spans = [(0, CONTEXT), *pairwise(BUCKETS)]
    for low, high in spans:
        pairs = [
            (a, b) for a, b in zip(plain.turns, tiered.turns, strict=True) if low < a.prompt <= high
        ]
        if not pairs:
            continue
        a, b = [p.ttft for p, _ in pairs], [t.ttft for _, t in pairs]
        ratio, least, most = interval(a, b)
        tokens = sum(p.prompt for p, _ in pairs)
        table.add_row(
            "all" if (low, high) == spans[0] else f"{low + 1}-{high}",
            str(len(pairs)),
            f"{sum(p.cached for p, _ in pairs) / tokens:.0%}",
            f"{sum(t.cached for _, t in pairs) / tokens:.0%}",
            f"{1000 * float(np.median(a)):.1f}",
            f"{1000 * float(np.median(b)):.1f}",
            f"{ratio:.2f} ({least:.2f}-{most:.2f})",
            f"{float(np.quantile(b, 0.95) / np.quantile(a, 0.95)):.2f}",
        )
    console.print(table)


def restart(console: Console, options: Sequence[str], folder: Path, seed: int) -> None:
    """Fill a disk, kill the worker, start it again, and ask the same."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(5, 400) for _ in range(1000)] for _ in range(8)]
    first = start("before", options, folder)
    before = [ask(first.url, prompt, 16) for prompt in prompts]
    time.sleep(1.0)  # the last blocks are still on their way
    os.kill(first.pid, signal.SIGKILL)
    first.stop()
    second = start("after", options, folder)
    try:
        after = [ask(second.url, prompt, 16) for prompt in prompts]
    finally:
        second.stop()
    same = sum(a.answer == b.answer for a, b in zip(before, after, strict=True))
    console.print(
        f"after kill -9: {sum(t.cached for t in after)} of {sum(t.prompt for t in after)} tokens "
        f"from the disk, {same} of {len(prompts)} answers equal; TTFT P50 "
        f"{1000 * float(np.median([t.ttft for t in before])):.1f} ms before, "
        f"{1000 * float(np.median([t.ttft for t in after])):.1f} ms after"
    )


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--least", type=int, default=60, help="tokens that a turn adds, at least")
    parser.add_argument("--most", type=int, default=240, help="and at most")
    parser.add_argument("--answer", type=int, default=8, help="tokens of an answer")
    parser.add_argument("--blocks", type=int, default=256, help="device blocks of 16 tokens")
    parser.add_argument("--host-cache", default="128MiB")
    parser.add_argument("--disk-cache", default="0")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--tier-policy", default="price")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    console = Console(width=120)
    console.print(machine())
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        device = ["--blocks", str(args.blocks), "--dtype", args.dtype]
        policy = f",policy={args.tier_policy}"
        tiers = ["--tier", f"host={args.host_cache}{policy}"]
        if args.disk_cache != "0":
            tiers += ["--tier", f"disk={args.disk_cache}@{folder / 'kv'}{policy}"]
        plain = Way("plain", start("plain", device, folder))
        stack.callback(plain.server.stop)
        tiered = Way("tiers", start("tiers", [*device, *tiers], folder))
        stack.callback(tiered.server.stop)
        play([plain, tiered], argparse.Namespace(**{**vars(args), "turns": 1}), args.seed - 1)
        plain.turns.clear()
        tiered.turns.clear()
        wrong = sum(play([plain, tiered], args, args.seed + i) for i in range(args.rounds))
        report(console, plain, tiered)
        console.print(f"{wrong} of {len(plain.turns)} answers differ")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiers = ["--tier", "host=16MiB", "--tier", f"disk=256MiB@{folder / 'kv'}"]
        restart(console, ["--blocks", str(args.blocks), *tiers], folder, 1)


if __name__ == "__main__":
    main()
