"""A prompt that another worker has cached: read from there, or computed again.

    python -m benchmarks.live.remote_fetch [--rounds 20] [--depths 128,256,512,1024,1536,2000]

`pigou serve` with two workers of the bundled model for both roles, and the policy `round-robin`:
a new prompt is computed by one of them, then asked for again of the other, which reads what the
first has where that is cheaper, and a third time, when whoever is asked has it itself. All three
TTFTs are through the same gateway, one after the other, in each round and at each depth (tokens of
the prompt), depths in a random order; answers are compared token by token. Printed: TTFT P50 of
the three ways, how many of the second were read, and the ratio of read to computed with its
bootstrap interval. A prompt that was not read is in the row all the same.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.lib.servers import LOOPBACK, Server, free_ports, machine
from benchmarks.live.tiers import Turn, ask, interval

#: Until the gateway has heard of what was cached.
_HEARD_S = 0.05


def start(args: argparse.Namespace, folder: Path) -> Server:
    """Start the fleet."""
    port = free_ports(1)[0]
    argv = [
        sys.executable, "-m", "pigou", "serve", "--host", LOOPBACK, "--port", str(port),
        "--both", "2", "--decode", "0", "--policy", "round-robin", "--threads", "1",
        "--dtype", args.dtype, "--kv-transfer", args.kv_transfer, "--", "--blocks", "2048",
    ]  # fmt: skip
    server = Server(argv, url=f"http://{LOOPBACK}:{port}", log=folder / "serve.log")
    server.wait_healthy(timeout_s=180)
    return server


def measure(
    url: str, depths: list[int], args: argparse.Namespace
) -> tuple[dict[int, list[tuple[Turn, Turn, Turn]]], int]:
    """Return the three ways of each round by depth, and how many answers differ."""
    rng = random.Random(args.seed)
    found: dict[int, list[tuple[Turn, Turn, Turn]]] = {depth: [] for depth in depths}
    wrong = 0
    for number in range(args.warm + args.rounds):
        for depth in rng.sample(depths, len(depths)):
            prompt = [rng.randrange(5, 400) for _ in range(depth)]
            turns = []
            for _ in range(3):
                turns.append(ask(url, prompt, args.answer))
                time.sleep(_HEARD_S)
            if number >= args.warm:
                found[depth].append((turns[0], turns[1], turns[2]))
                wrong += len({turn.answer for turn in turns}) > 1
    return found, wrong


def report(console: Console, found: dict[int, list[tuple[Turn, Turn, Turn]]]) -> None:
    """Print TTFT by depth."""
    table = Table(
        "depth", "read", "computed, ms", "read, ms", "own cache, ms", "read / computed (95%)"
    )
    for depth, rounds in found.items():
        computed, read, own = ([way.ttft for way in ways] for ways in zip(*rounds, strict=True))
        ratio, least, most = interval(computed, read)
        table.add_row(
            str(depth),
            f"{sum(ways[1].cached > 0 for ways in rounds)} of {len(rounds)}",
            *(f"{1000 * float(np.median(each)):.1f}" for each in (computed, read, own)),
            f"{ratio:.2f} ({least:.2f}-{most:.2f})",
        )
    console.print(table)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warm", type=int, default=3, help="rounds before that do not count")
    parser.add_argument("--depths", default="128,256,512,1024,1536,2000")
    parser.add_argument("--answer", type=int, default=8, help="tokens of an answer")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--kv-transfer", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    console = Console(width=110)
    console.print(machine())
    with tempfile.TemporaryDirectory() as name:
        server = start(args, Path(name))
        try:
            found, wrong = measure(server.url, [int(d) for d in args.depths.split(",")], args)
        finally:
            server.stop()
    report(console, found)
    console.print(f"{wrong} of {sum(map(len, found.values()))} answers differ")


if __name__ == "__main__":
    main()
