"""Three tenants on a live fleet, one of them ten times as loud: what the others feel of it.

``python -m benchmarks.live_tenants`` starts workers, and in turns a gateway with each order of
admission before them. Each quiet tenant is measured alone first, then all three together. Printed:
TTFT P95 of each, and the ratio of the quiet ones' to what they get alone (1.3 is the target).
Few cores cannot hold many busy workers and their clients: `--timing` lets workers sleep instead.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.common import LOOPBACK, Server, free_ports, machine, unwind_on_terminate
from benchmarks.live_routing import FLEETS, fleet
from pigou.gateway.keys import make_key

QUIET = ("anna", "bert")
LOUD = "carl"


@dataclass(frozen=True)
class Run:
    """One order of admission, once; TTFT P95 in milliseconds, by tenant."""

    order: str
    alone: Mapping[str, float]
    together: Mapping[str, float]
    shed: int

    @property
    def worst(self) -> float:
        """The worse of the quiet tenants' ratios."""
        return max(self.together[name] / self.alone[name] for name in QUIET)


def main() -> None:
    """Run the benchmark and print its table."""
    args = _arguments()
    unwind_on_terminate()
    print("machine:", machine())
    runs: list[Run] = []
    with tempfile.TemporaryDirectory() as folder, fleet(args, Path(folder)) as workers:
        order = np.random.default_rng(args.seed)
        for _ in range(args.rounds):
            for place in order.permutation(len(args.order)).tolist():
                runs.append(run(args, args.order[place], workers, Path(folder)))
                print(runs[-1], f"worst ratio {runs[-1].worst:.2f}", flush=True)
    print(f"\n{'order':12}{'worst ratio, median':>22}{'each round':>30}")
    for name in args.order:
        ratios = [each.worst for each in runs if each.order == name]
        shown = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"{name:12}{np.median(ratios):22.2f}{shown:>30}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fleet", choices=[*FLEETS, "2vllm"], default="2both")
    parser.add_argument("--order", action="append", default=None)
    parser.add_argument("--policy", default="toll")
    parser.add_argument("--rate", type=float, default=2.0, help="of a quiet tenant, a second")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--input", default="128:512")
    parser.add_argument("--output", default="32:96")
    parser.add_argument("--blocks", type=int, default=2000)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="")
    parser.add_argument("--timing", default="", help="workers sleep by it, and compute nothing")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.order = args.order or ["fcfs", "fair"]
    return args


def run(args: argparse.Namespace, order: str, workers: Sequence[str], folder: Path) -> Run:
    """Measure each quiet tenant alone, then all together."""
    keys = folder / "keys"
    made = {name: make_key(name) for name in (*QUIET, LOUD)}
    keys.write_text("".join(line + "\n" for _, line in made.values()))
    (port,) = free_ports(1)
    argv = [sys.executable, "-m", "pigou", "serve", "--policy", args.policy, "--port", str(port),
            "--admission", order, "--api-keys-file", str(keys)]  # fmt: skip
    for worker in workers:
        argv += ["--attach", worker]
    url = f"http://{LOOPBACK}:{port}"
    rates = dict.fromkeys(QUIET, args.rate) | {LOUD: 10 * args.rate}
    with Server(argv, url=url, log=folder / "gateway.log") as gateway:
        gateway.wait_healthy()
        load(args, url, made, dict.fromkeys(made, args.rate), folder, 5.0)  # learns speeds
        alone = {
            name: load(args, url, made, {name: args.rate}, folder, args.seconds)[0][name]
            for name in QUIET
        }
        together, shed = load(args, url, made, rates, folder, args.seconds)
    return Run(order, alone, together, shed)


def load(
    args: argparse.Namespace, url: str, keys: Mapping[str, tuple[str, str]],
    rates: Mapping[str, float], folder: Path, seconds: float,
) -> tuple[dict[str, float], int]:  # fmt: skip
    """Load with each tenant at its rate at once; return TTFT P95 by tenant, and failures."""
    clients = {}
    for place, (name, rate) in enumerate(rates.items()):
        argv = [sys.executable, "-m", "pigou", "bench", url, "--rate", str(rate), "--input",
                args.input, "--output", args.output, "--duration", str(seconds),
                "--seed", str(place + int(rate * 1000)), "--json", str(folder / name)]  # fmt: skip
        env = os.environ | {"PIGOU_API_KEY": keys[name][0]}
        clients[name] = subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL)
    for client in clients.values():
        client.wait()
    found = {name: json.loads((folder / name).read_text()) for name in rates}
    p95 = {name: each["ttft_ms"]["p95"] for name, each in found.items()}
    return p95, sum(each["failed"] for each in found.values())


if __name__ == "__main__":
    main()
