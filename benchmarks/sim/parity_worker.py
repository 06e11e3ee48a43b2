"""One real worker on a core of its own beside its simulation, for `benchmarks.sim.parity`."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.servers import LOOPBACK, Server, available_cores, free_ports, get_json
from benchmarks.sim.parity_figures import (
    Pair,
    Side,
    compare,
    compare_rounds,
    mean,
    of_bench,
    of_simulation,
)
from pigou.config import ControlConfig
from pigou.sim.client import ClientConfig
from pigou.sim.fleet_config import read_fleet
from pigou.sim.setup import Setup
from pigou.sim.simulation import UNLIMITED, Simulation
from pigou.sim.workload import ClosedLoop, OpenLoop, RequestLengths
from pigou.workload.trace_formats import read_trace
from pigou.workload.workload_spec import from_trace

#: Limits of the real worker.
WORKER_SEQS, WORKER_BUDGET = 32, 512
WORKER_INPUT, WORKER_OUTPUT = (32, 512), (16, 128)
LONGEST_SERVED = WORKER_INPUT[1] + WORKER_OUTPUT[1]
#: Before each load: a kernel is made for each number of rows that is computed for the first time.
WARM_UP = ("--warmup", "150", "--input", "32:512", "--output", "4")
#: Loads, as shares of the most that it does.
SHARES = (0.3, 0.5, 0.7)


def worker_parity(args: argparse.Namespace, folder: Path) -> None:
    """Compare one worker on its core with the simulation by its profile."""
    engine, client = available_cores()[:2]
    (port,) = free_ports(1)
    argv = [sys.executable, "-m", "pigou", "worker", "--port", str(port), "--threads", "1",
            "--max-batched-tokens", str(WORKER_BUDGET), "--max-seqs", str(WORKER_SEQS),
            "--order", "fcfs", "--dtype", args.dtype]  # fmt: skip
    url = f"http://{LOOPBACK}:{port}"
    environment = {"OMP_NUM_THREADS": "1"}
    log = folder / "worker.log"
    rounds: dict[float, list[Pair]] = {}
    with Server(argv, url=url, log=log, env=environment, cores=[engine]) as server:
        server.wait_healthy()
        os.sched_setaffinity(0, [client])  # processes started from here on inherit it
        limits = get_json(f"{url}/server_info")
        timing = before = args.timing or profiled(url, folder / "timing.json", args)
        rates = rates_of(args, timing)
        for number, rate in product(range(args.rounds), rates):
            here = folder / f"round-{number}"
            here.mkdir(exist_ok=True)
            trace = here / f"rate-{rate:g}.jsonl"
            sessions = arrivals(rate, args.seconds, args.seed + number)
            trace.write_text("".join(json.dumps(row) + "\n" for row in sessions))
            seen = bench(url, trace)
            after = args.timing or profiled(url, here / f"timing-{rate:g}.json", args)
            said = mean([simulate_worker(trace, each, limits) for each in (before, after)])
            before = after
            compare(f"{rate:.1f} requests/s", seen, said)
            rounds.setdefault(rate, []).append((seen, said))
    if args.rounds > 1:
        for rate, pairs in rounds.items():
            compare_rounds(f"{rate:.1f} requests/s", pairs)


def bench(url: str, trace: Path) -> Side:
    """Send a trace's requests to the worker, after some that wake it; return what was seen."""
    figures = trace.with_suffix(".json")
    command = [sys.executable, "-m", "pigou", "bench", url, "--trace", str(trace), *WARM_UP,
               "--json", str(figures)]  # fmt: skip
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return of_bench(json.loads(figures.read_text()))


def profiled(url: str, file: Path, args: argparse.Namespace) -> str:
    """Profile the worker, show what was found, and return the timing's file."""
    command = [sys.executable, "-m", "pigou", "profile", url, "--out", str(file),
               "--repeats", str(args.repeats), "--max-seqs", str(args.streams),
               "--longest", str(LONGEST_SERVED)]  # fmt: skip
    print(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout, flush=True)
    return str(file)


def rates_of(args: argparse.Namespace, timing: str) -> list[float]:
    """Return the rates that were asked for, or shares of what the worker can do at most."""
    if args.rates:
        return [float(rate) for rate in args.rates.split(",")]
    lengths = RequestLengths(input=WORKER_INPUT, output=WORKER_OUTPUT)
    loop = ClosedLoop(lengths=lengths, phases=((WORKER_SEQS, 20.0),))
    limits = {"blocks": 4096, "max_batched_tokens": WORKER_BUDGET, "max_model_len": 2048}
    most = worker_simulation(loop, timing, limits).run().document()["throughput_rps"]
    print(f"the simulated worker does {most:.1f} requests/s at most")
    return [round(share * most, 1) for share in SHARES]


def arrivals(rate: float, seconds: float, seed: int) -> list[dict[str, float]]:
    """Return the rows of a trace: Poisson arrivals, prompts like no other."""
    rng = np.random.default_rng(seed)
    rows, at = [], 0.0
    while (at := at + float(rng.exponential(1 / rate))) < seconds:
        lengths = [int(rng.integers(low, high + 1)) for low, high in (WORKER_INPUT, WORKER_OUTPUT)]
        rows.append({"arrival_s": at, "input": lengths[0], "output": lengths[1]})
    return rows


def simulate_worker(trace: Path, timing: str, limits: dict[str, Any]) -> Side:
    """Simulate a worker of these limits."""
    workload = from_trace(read_trace(trace))
    return of_simulation(worker_simulation(workload, timing, limits).run(), workload.request_count)


def worker_simulation(
    workload: OpenLoop | ClosedLoop, timing: str, limits: dict[str, Any]
) -> Simulation:
    """Return a simulation of one worker, to which everything is sent at once."""
    setup = Setup(timing=timing, blocks=limits["blocks"], engine="pigou", max_seqs=WORKER_SEQS,
                  max_batched_tokens=limits["max_batched_tokens"],
                  max_model_len=limits["max_model_len"])  # fmt: skip
    control = ControlConfig(max_inflight=UNLIMITED, max_inflight_tokens=UNLIMITED,
                            max_queued=UNLIMITED, queue_timeout=UNLIMITED)  # fmt: skip
    return Simulation(workload, read_fleet("1xboth"), setup, control, ClientConfig())
