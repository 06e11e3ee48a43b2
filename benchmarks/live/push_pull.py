"""Push and pull of prompts on live fleets whose workers sleep in place of computing.

Four prefill workers take 50 ms a prompt, one decode worker streams 8 tokens. A round starts each
fleet by itself, in an order that the round draws anew, and sends it the same requests.

    python -m benchmarks.live.push_pull [--rounds 2] [--rate 48] [--requests 300]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean

from tests.lib.server_process import nats_server

from benchmarks.lib.rounds import shuffled_rounds
from benchmarks.lib.servers import LOOPBACK, Server, free_ports, get_json

#: Name of a fleet -> its routing policy, and whether prompts are pulled.
FLEETS = {
    "push toll": ("toll", False),
    "push round-robin": ("round-robin", False),
    "push least-loaded": ("least-loaded", False),
    "pull price": ("least-loaded", True),
}
LAW = "law:itl_a=0.002,prefill=0.05,prefill_token=0.000001"


def start(policy: str, queue: str, log: Path) -> Server:
    """Start a gateway with its five workers."""
    (port,) = free_ports(1)
    command = [
        sys.executable, "-m", "pigou", "serve", "--prefill", "4", "--decode", "1", "--port",
        str(port), "--policy", policy, "--timing", LAW, "--kv-transfer", "tcp",
    ]  # fmt: skip
    command += ["--prefill-queue", queue] if queue else []
    return Server(command, url=f"http://{LOOPBACK}:{port}", log=log)


def load(url: str, rate: float, requests: int, seed: int, file: Path) -> dict[str, float]:
    """Send a round's requests; return mean, median and P99 of the TTFT in milliseconds."""
    command = [
        sys.executable, "-m", "pigou", "bench", url, "--rate", str(rate), "--requests",
        str(requests), "--input", "512", "--output", "8", "--seed", str(seed), "--json", str(file),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    document = json.loads(file.read_text())
    assert document["failed"] == 0, document["failures"]
    return {name: document["ttft_ms"][name] for name in ("mean", "p50", "p99")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--rate", type=float, default=48.0, help="requests/s, of 80 at most")
    parser.add_argument("--requests", type=int, default=300)
    asked = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        nats = stack.enter_context(nats_server(folder, ()))
        figures = defaultdict(list)
        for number, name in shuffled_rounds(list(FLEETS), asked.rounds, seed=0):
            policy, pulls = FLEETS[name]
            queue = f"{nats.url}/bench?storage=memory" if pulls else ""
            with start(policy, queue, folder / f"{number}-{name}".replace(" ", "-")) as server:
                server.wait_healthy("/health", 300)
                while any(w["state"] != "up" for w in get_json(f"{server.url}/workers")["workers"]):
                    time.sleep(0.5)
                load(server.url, 20.0, 60, 999, folder / "warm.json")
                row = load(server.url, asked.rate, asked.requests, number, folder / "round.json")
            figures[name].append(row)
            print(number, name, {key: round(value, 1) for key, value in row.items()}, flush=True)
        print(f"{'fleet':<20} mean ms    P50    P99   (means of {asked.rounds} rounds)")
        for name, rows in figures.items():
            means = [fmean(row[key] for row in rows) for key in ("mean", "p50", "p99")]
            print(f"{name:<20}" + "".join(f"{value:8.1f}" for value in means))


if __name__ == "__main__":
    main()
