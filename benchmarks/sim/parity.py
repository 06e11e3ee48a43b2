"""Live against simulated, side by side: TTFT, ITL and throughput at three loads.

``python -m benchmarks.sim.parity fleet`` runs a real gateway and real worker processes, 1P/2D, that
sleep as a timing law says; ``worker`` one real worker on a core of its own with the bundled
model, profiled by ``pigou profile`` before each load and after the last. Each run's journal
(``fleet``) is then replayed, which must give the same decisions, and its arrivals are simulated.

A machine whose pace changes within a minute was another one when it was profiled: a load is
therefore simulated by the profile before it and by the one after it, and the figures are means of
both. ``--rounds`` repeats each load, in turns, each with arrivals of its own, and ends with
medians.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.lib.servers import machine, unwind_on_terminate
from benchmarks.sim.parity_fleet import fleet_parity
from benchmarks.sim.parity_worker import WORKER_SEQS, worker_parity
from pigou.engine.startup_profiling import warm_up


def main() -> None:
    """Run the benchmark and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["fleet", "worker"])
    parser.add_argument("--rates", default="", help="requests a second, with commas")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each load")
    parser.add_argument("--policy", default="toll", help="of the fleet")
    parser.add_argument("--timing", default="", help="of the worker; by default it is profiled")
    parser.add_argument("--repeats", type=int, default=5, help="of each measurement of the profile")
    parser.add_argument("--rounds", type=int, default=1, help="of the worker's loads")
    parser.add_argument("--streams", type=int, default=WORKER_SEQS,
                        help="that the worker is profiled with at most")  # fmt: skip
    parser.add_argument("--dtype", default="auto", help="of the worker's weights and cache")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", default="", help="folder for journals, timing and figures")
    parser.add_argument("--again", action="store_true", help="compare the fleet's runs kept there")
    args = parser.parse_args()
    if args.again and not (args.keep and args.what == "fleet"):
        parser.error("--again compares what a run of fleet kept: give its --keep")
    if args.rounds < 1 or (args.rounds > 1 and args.what == "fleet"):
        parser.error(f"--rounds {args.rounds}: at least 1, and of a worker that computes")
    unwind_on_terminate()
    print("machine:", machine())
    p50, p99 = lateness()
    print(f"a bare sleep of 20 ms ends late by {p50:.2f} ms (p50), {p99:.2f} ms (p99)", flush=True)
    warm_up()
    with tempfile.TemporaryDirectory() as folder:
        keep = Path(args.keep or folder)
        keep.mkdir(parents=True, exist_ok=True)
        (fleet_parity if args.what == "fleet" else worker_parity)(args, keep)


def lateness(count: int = 150) -> tuple[float, float]:
    """Return how late sleeps end here, in milliseconds: what this machine adds to every step."""
    late, when = [], time.monotonic()
    for _ in range(count):
        when += 0.02
        time.sleep(max(0.0, when - time.monotonic()))
        late.append(1e3 * (time.monotonic() - when))
    p50, p99 = np.percentile(late, [50, 99]).tolist()
    return p50, p99


if __name__ == "__main__":
    main()
