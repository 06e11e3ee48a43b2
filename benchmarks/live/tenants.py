"""Three tenants on a live fleet, one of them ten times as loud: what the others feel of it.

``python -m benchmarks.live.tenants`` starts workers, and in turns a gateway with each order of
admission before them. Each quiet tenant is measured alone first, then all three together, with the
same requests, until the quiet ones are done. Printed: TTFT P95 of each, the ratio of the quiet
ones' to what they get alone (1.3 is the target), and what the loud one was served meanwhile.
``--background`` is the workers' ``--max-background-tokens``. Few cores cannot hold many busy
workers and their clients: ``--timing`` lets workers sleep instead.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.rounds import shuffled_rounds
from benchmarks.lib.servers import (
    LOOPBACK,
    Server,
    free_ports,
    machine,
    unwind_on_terminate,
)
from benchmarks.live.routing import FLEETS, fleet
from pigou.control.admission.admission_queue import LINGERS
from pigou.gateway.auth.keys import make_key
from pigou.request import SECOND

QUIET = ("anna", "bert")
LOUD = "carl"


@dataclass(frozen=True)
class Run:
    """One order of admission, once; TTFT P95 in milliseconds, by tenant.

    `requests` of each quiet tenant were measured, of which `failed` failed; `loud` tokens a second
    is what the loud one was sent meanwhile, in streams that ended.
    """

    order: str
    alone: Mapping[str, float]
    together: Mapping[str, float]
    requests: Mapping[str, int]
    failed: int
    loud: float

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
        for _, order in shuffled_rounds(args.order, args.rounds, args.seed):
            runs.append(run(args, order, len(runs), workers, Path(folder)))
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
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--input", default="128:512")
    parser.add_argument("--output", default="32:96")
    parser.add_argument("--blocks", type=int, default=2000)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--background", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="")
    parser.add_argument("--timing", default="", help="workers sleep by it, and compute nothing")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.order = args.order or ["fcfs", "fair"]
    # The same requests come twice: what is left of the first time must not help the second.
    args.worker = ["--max-background-tokens", str(args.background), "--no-prefix-caching"]
    return args


def run(
    args: argparse.Namespace, order: str, number: int, workers: Sequence[str], folder: Path
) -> Run:
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
    clients = {
        name: Client(
            args, url, made[name][0], folder / name, 10 * place + 100 * (args.seed + number)
        )
        for place, name in enumerate(made)
    }
    with Server(argv, url=url, log=folder / "gateway.log") as gateway:
        gateway.wait_healthy()
        for client in clients.values():  # all speeds are learned
            client.start(args.rate, 5.0, warm=True)
        for client in clients.values():
            client.wait()
        alone = {}
        for name in QUIET:
            time.sleep(LINGERS / SECOND)  # until whoever was there before no longer counts
            clients[name].start(args.rate, args.seconds)
            alone[name] = clients[name].wait()["ttft_ms"]["p95"]
        before, began = served(url, made[LOUD][0]), time.monotonic()
        clients[LOUD].start(10 * args.rate, args.seconds)
        for name in QUIET:
            clients[name].start(args.rate, args.seconds)
        found = {name: clients[name].wait() for name in QUIET}
        loud = (served(url, made[LOUD][0]) - before) / (time.monotonic() - began)
        clients[LOUD].stop()
    return Run(
        order,
        alone,
        {name: each["ttft_ms"]["p95"] for name, each in found.items()},
        {name: each["offered"] for name, each in found.items()},
        sum(each["failed"] for each in found.values()),
        loud,
    )


class Client:
    """A tenant's load client: a process for each time that it sends."""

    def __init__(
        self, args: argparse.Namespace, url: str, key: str, report: Path, seed: int
    ) -> None:
        self._args, self._url, self._report, self._seed = args, url, report, seed
        self._env = os.environ | {"PIGOU_API_KEY": key}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, rate: float, seconds: float, warm: bool = False) -> None:
        """Send `rate` requests a second; each time the same ones, but for the warm-up."""
        argv = [sys.executable, "-m", "pigou", "bench", self._url, "--rate", str(rate), "--input",
                self._args.input, "--output", self._args.output, "--duration", str(seconds),
                "--seed", str(self._seed + warm), "--json", str(self._report)]  # fmt: skip
        self._process = subprocess.Popen(argv, env=self._env, stdout=subprocess.DEVNULL)

    def wait(self) -> dict[str, Any]:
        """Wait until every request has ended; return the report."""
        assert self._process is not None
        self._process.wait()
        found: dict[str, Any] = json.loads(self._report.read_text())
        return found

    def stop(self) -> None:
        """Take back what has not ended."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()


def served(url: str, key: str) -> float:
    """Return the output tokens of a tenant's streams so far, as its key is told."""
    request = urllib.request.Request(url + "/usage", headers={"authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=30.0) as reply:
        return float(json.loads(reply.read())["generation_tokens"])


if __name__ == "__main__":
    main()
