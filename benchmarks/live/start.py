"""Seconds, CPU-seconds and memory until `pigou serve` is ready, of several checkouts in turn.

Run as `python -m benchmarks.live.start [--rounds 5] [NAME=CHECKOUT ...]`; by default this checkout.
A checkout that has not started before compiles its kernels first, so one round warms up.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil

from benchmarks.lib.servers import free_ports, machine


def start(checkout: Path, options: list[str]) -> tuple[float, float, float]:
    """Return seconds, CPU-seconds and unshared MiB of a fleet's processes when it is ready."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    path = [str(checkout / "src"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path)
    began = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-m", "pigou", "serve", "--port", str(free_ports(1)[0]), *options],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=checkout,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            if not any("Ctrl-C" in line for line in process.stdout):
                raise RuntimeError(f"{checkout}: pigou serve ended before it was ready")
            seconds = time.monotonic() - began
            tree = [root := psutil.Process(process.pid), *root.children(recursive=True)]
            cpu_s = sum(sum(each.cpu_times()[:2]) for each in tree)
            memory = sum(each.memory_full_info().uss for each in tree) / 2**20
        finally:
            process.send_signal(signal.SIGINT)
            process.stdout.read()
    return seconds, cpu_s, memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("checkouts", nargs="*", help="NAME=DIR; this checkout by default")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", default="", help="options of `pigou serve`, in one word")
    args = parser.parse_args()
    named = [each.partition("=") for each in args.checkouts]
    checkouts = {name: Path(path) for name, _, path in named} or {"this": Path.cwd()}
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in checkouts}
    for turn in range(1 + args.rounds):
        for name, checkout in checkouts.items():
            taken = start(checkout, args.serve.split())
            found[name] += [taken] * (turn > 0)
    print("; ".join(f"{name} {value}" for name, value in machine().items()))
    for name, taken_each in found.items():
        for what, column in zip(
            ("s", "CPU-s", "MiB unshared"), zip(*taken_each, strict=True), strict=True
        ):
            values = " ".join(f"{value:.1f}" for value in sorted(column))
            print(f"{name:12} {statistics.median(column):7.1f} {what:13} ({values})")


if __name__ == "__main__":
    main()
