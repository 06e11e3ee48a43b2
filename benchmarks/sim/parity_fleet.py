"""A gateway and workers that sleep beside their simulation, for `benchmarks.sim.parity`."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.servers import LOOPBACK, Server, free_ports
from benchmarks.sim.parity_figures import Side, compare, of_bench, of_simulation
from pigou.control.journal import JournalEntry, JournalHead
from pigou.control.messages import FirstToken, PrefillDone, Submit
from pigou.request import Role
from pigou.sim.client import ClientConfig
from pigou.sim.fleet_config import FleetConfig, WorkerGroup
from pigou.sim.network import LinkConfig
from pigou.sim.result import SimulationResult
from pigou.sim.setup import Setup
from pigou.sim.simulation import Simulation
from pigou.workload.journal_file import lines
from pigou.workload.trace_formats import read_trace
from pigou.workload.workload_spec import from_trace

LAW = "law:itl_a=0.02,itl_b=0.0002,prefill=0.004,prefill_token=0.00005"
#: As workers that sleep share it.
LINK = LinkConfig(gbps=25.0, latency_us=200.0, sharing="fifo", ends="receiver")
BLOCKS, BLOCK, SEQS, BUDGET, LONGEST = 4096, 16, 64, 2048, 2048
#: Bytes of a token's KV in the timed model (Llama-3.1-8B).
MODEL = "llama-3.1-8b"
PROMPTS = ("--input", "64:768", "--output", "32:128", "--prefixes", "4", "--prefix-length", "256")
#: Requests one after another, by which the overhead of the way is measured.
IDLE = 25


def fleet_parity(args: argparse.Namespace, folder: Path) -> None:
    """Compare a gateway and its sleeping workers with the simulation of the same arrivals."""
    idle = ["--concurrency", "1", "--requests", str(IDLE), "--output", "4"]
    journal, load = live(args, folder, "idle", idle)
    ways = measure_ways(journal, load)
    print(f"ways, on the idle fleet: leg_ms {ways.leg:.2f}, overhead_ms {ways.overhead:.2f}")
    for rate in map(float, (args.rates or "8,16,24").split(",")):
        name, count = f"rate-{rate:g}", round(rate * args.seconds)
        offered = ["--rate", str(rate), "--requests", str(count), "--seed", str(args.seed)]
        journal, load = live(args, folder, name, offered)
        count = load["offered"]
        if not args.again:  # other code may decide otherwise
            replay(journal)
        compare(f"{rate:g} requests/s", of_bench(load), simulate(journal, count, ways)[0])


def live(
    args: argparse.Namespace, folder: Path, name: str, load: Sequence[str]
) -> tuple[Path, dict[str, Any]]:
    """Start a fleet, load it, end it; return its journal and what the load client saw."""
    journal, figures = folder / f"{name}.journal", folder / f"{name}.json"
    if args.again:
        return journal, json.loads(figures.read_text())
    journal.unlink(missing_ok=True)
    with served(args.policy, journal, folder / f"{name}.log") as url:
        command = [sys.executable, "-m", "pigou", "bench", url, *PROMPTS, *load,
                   "--json", str(figures)]  # fmt: skip
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return journal, json.loads(figures.read_text())


@contextmanager
def served(policy: str, journal: Path, log: Path) -> Iterator[str]:
    """Serve by 1P/2D that sleep; yield the gateway's address."""
    (port,) = free_ports(1)
    argv = [sys.executable, "-m", "pigou", "serve", "--prefill", "1", "--decode", "2",
            "--policy", policy, "--port", str(port), "--journal", str(journal), "--timing", LAW,
            "--", "--blocks", str(BLOCKS), "--block-size", str(BLOCK), "--max-seqs", str(SEQS),
            "--max-batched-tokens", str(BUDGET), "--max-model-len", str(LONGEST), "--order", "fcfs",
            "--timing-model", MODEL,
            "--timing-link", f"gbps={LINK.gbps:g},latency_us={LINK.latency_us:g}"]  # fmt: skip
    url = f"http://{LOOPBACK}:{port}"
    with Server(argv, url=url, log=log) as server:
        yield server.wait_healthy().url


def replay(journal: Path) -> None:
    """Make a journal's decisions again; they must be the same."""
    command = [sys.executable, "-m", "pigou", "replay", str(journal)]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    print("\n" + told.splitlines()[0])


@dataclass(frozen=True)
class Ways:
    """What requests take besides steps, in milliseconds, as `FleetConfig` has them."""

    leg: float = 0.0
    overhead: float = 0.0


def measure_ways(journal: Path, load: dict[str, Any]) -> Ways:
    """Return what an idle fleet takes more than the law, where no request waits for another.

    What the gateway waits for a first token is shared among the legs of the requests; what the
    client waits more than the gateway is the way between them.
    """
    waited, legs = gateway_view(journal)
    _, result = simulate(journal, IDLE, Ways())
    said = [call.first_token_ns - call.intended_ns for call in result.runs[-IDLE:]]
    leg = (float(np.median(waited)) - float(np.median(said)) / 1e6) / legs
    return Ways(leg, load["ttft_ms"]["p50"] - float(np.median(waited)))


def gateway_view(journal: Path) -> tuple[list[float], float]:
    """Return milliseconds from each request to its first token, and how many legs one had."""
    asked: dict[str, int] = {}
    waited: list[float] = []
    remote = 0
    for line in lines(journal):
        entry = line.entry
        if not isinstance(entry, JournalEntry):
            continue
        match entry.message:
            case Submit(request):
                asked.setdefault(request.id, entry.now)
            case PrefillDone():
                remote += 1
            case FirstToken(request):
                waited.append((entry.now - asked[request]) / 1e6)
    return waited[-IDLE:], 1 + remote / len(asked)


def simulate(journal: Path, count: int, ways: Ways) -> tuple[Side, SimulationResult]:
    """Simulate a journal's arrivals; figures of the last `count` of them.

    Those before are of the load client, which asks what the endpoint can do.
    """
    head = next(lines(journal)).entry
    assert isinstance(head, JournalHead)
    fleet = FleetConfig(
        workers=(WorkerGroup(role=Role.PREFILL), WorkerGroup(role=Role.DECODE, count=2)),
        link=LINK,
        overhead_ms=max(0.0, ways.overhead),
        leg_ms=max(0.0, ways.leg),
    )
    setup = Setup(model=MODEL, timing=LAW, blocks=BLOCKS, max_batched_tokens=BUDGET, max_seqs=SEQS,
                  max_model_len=LONGEST, engine="pigou")  # fmt: skip
    workload = from_trace(read_trace(journal))
    result = Simulation(workload, fleet, setup, head.config, ClientConfig()).run()
    return of_simulation(result, count), result
