"""A burst of long prompts on a live prefill/decode fleet: who computes them, and what it costs.

``python -m benchmarks.live.burst`` starts one prefill and two decode workers with the bundled
model, and in turns a gateway with each policy. Short requests stream all the time; every few
seconds a burst of long prompts comes at once. Printed: TTFT of the long ones, ITL of the short
streams beside the SLO, and the share of long prompts that were computed where they were decoded.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.lib.rounds import shuffled_rounds
from benchmarks.lib.servers import (
    LOOPBACK,
    Server,
    free_ports,
    get_json,
    machine,
    unwind_on_terminate,
)
from benchmarks.live.routing import fleet

_LONG = 1000


@dataclass(frozen=True)
class Run:
    """What one policy did once; milliseconds, and a share."""

    policy: str
    long_ttft_p50: float
    long_ttft_p99: float
    short_ttft_p99: float
    short_itl_p50: float
    short_itl_p99: float
    local: float
    failed: int


def main() -> None:
    """Run the benchmark and print its table."""
    args = _arguments()
    unwind_on_terminate()
    print("machine:", machine())
    runs: list[Run] = []
    with tempfile.TemporaryDirectory() as folder, fleet(args, Path(folder)) as workers:
        for number, policy in shuffled_rounds(args.policy, args.rounds, args.seed):
            runs.append(run(args, policy, workers, Path(folder), number))
            print(runs[-1], flush=True)
    report(runs, args)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", action="append", default=None)
    parser.add_argument("--rate", type=float, default=3.0, help="short requests a second")
    parser.add_argument("--burst", type=int, default=8, help="long prompts in a burst")
    parser.add_argument("--bursts", type=int, default=5)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between bursts")
    parser.add_argument("--itl-slo", type=float, default=100.0, help="milliseconds")
    parser.add_argument("--blocks", type=int, default=2000)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="", help="folder, or 75m; by default the bundled model")
    parser.add_argument("--timing", default="", help="workers sleep by it, and compute nothing")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.fleet = "1p2d"
    args.policy = args.policy or ["least-loaded", "toll"]
    return args


def run(
    args: argparse.Namespace, policy: str, workers: Sequence[str], folder: Path, number: int
) -> Run:
    """Put a gateway with this policy before the workers, and load it twice at once."""
    (port,) = free_ports(1)
    argv = [sys.executable, "-m", "pigou", "serve", "--policy", policy, "--port", str(port)]
    for worker in workers:
        argv += ["--attach", worker]
    url = f"http://{LOOPBACK}:{port}"
    seconds = args.bursts * args.every
    name = f"{number}-{policy}".replace(",", "-")
    bursts = folder / f"{name}.jsonl"
    bursts.write_text("".join(json.dumps(row) + "\n" for row in _rows(args, name)))
    long, short = folder / "long.json", folder / "short.json"
    bench = [sys.executable, "-m", "pigou", "bench", url, "--seed", str(abs(hash(name)) % 10**6)]
    with Server(argv, url=url, log=folder / "gateway.log") as gateway:
        gateway.wait_healthy()
        steady = subprocess.Popen(
            [*bench, "--rate", str(args.rate), "--duration", str(seconds + 3), "--warmup", "8",
             "--input", "32:96", "--output", "64:192", "--json", str(short)],
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        subprocess.run([*bench, "--trace", str(bursts), "--json", str(long)], check=False,
                       stdout=subprocess.DEVNULL)  # fmt: skip
        steady.wait()
        local = _local(url)
    one, other = json.loads(long.read_text()), json.loads(short.read_text())
    return Run(
        policy,
        one["ttft_ms"]["p50"],
        one["ttft_ms"]["p99"],
        other["ttft_ms"]["p99"],
        other["itl_ms"]["p50"],
        other["itl_ms"]["p99"],
        local,
        one["failed"] + other["failed"],
    )


def _rows(args: argparse.Namespace, name: str) -> list[dict[str, object]]:
    """Mooncake rows of the bursts; block ids of this run alone."""
    first = abs(hash(name)) % 10**8 * 1000
    rng = np.random.default_rng(args.seed)
    rows = []
    for burst in range(args.bursts):
        for _ in range(args.burst):
            first += 4
            rows.append(
                {
                    "timestamp": 3000 + 1000 * args.every * burst,
                    "input_length": int(rng.integers(1200, 1900)),
                    "output_length": int(rng.integers(8, 32)),
                    "hash_ids": list(range(first, first + 4)),
                }
            )
    return rows


def _local(url: str) -> float:
    """Share of the long prompts that were computed by their decode worker."""
    found = get_json(url + "/decisions?limit=1000")["decisions"]
    long = [each for each in found if each["prompt_tokens"] >= _LONG]
    local = [not each["prefill"] for each in long]
    return sum(local) / max(1, len(local))


def report(runs: Sequence[Run], args: argparse.Namespace) -> None:
    """Print the median of each policy's runs."""
    names = ("long_ttft_p50", "long_ttft_p99", "short_ttft_p99", "short_itl_p50",
             "short_itl_p99", "local")  # fmt: skip
    print(f"\n{'policy':16}" + "".join(f"{name:>16}" for name in names) + "  failed")
    for policy in args.policy:
        mine = [each for each in runs if each.policy == policy]
        values = [float(np.median([getattr(each, name) for each in mine])) for name in names]
        shown = "".join(f"{value:16.2f}" for value in values)
        print(f"{policy:16}{shown}  {sum(each.failed for each in mine)}")
    print(f"ITL SLO: P99 at most {args.itl_slo:g} ms")


if __name__ == "__main__":
    main()
