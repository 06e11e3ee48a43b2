"""Live against simulated, side by side: TTFT, ITL and throughput at three loads.

``python -m benchmarks.parity fleet`` runs a real gateway and real worker processes, 1P/2D, that
sleep as a timing law says; ``worker`` one real worker on a core of its own with the bundled
model, profiled first by ``pigou profile``. Each run's journal (``fleet``) is then replayed, which
must give the same decisions, and its arrivals are simulated.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from benchmarks.common import (
    LOOPBACK,
    Server,
    available_cores,
    free_ports,
    get_json,
    machine,
    unwind_on_terminate,
)
from pigou.config import ControlConfig
from pigou.control.journal import First, Head, Prefilled, Submit
from pigou.engine.warm import warm_up
from pigou.request import SECOND, Role
from pigou.sim.client import ClientConfig
from pigou.sim.config import FleetConfig, Members, read_fleet
from pigou.sim.network import LinkConfig
from pigou.sim.result import Result, summary
from pigou.sim.simulate import UNLIMITED, Setup, Simulation
from pigou.sim.workload import ClosedLoop, Lengths, OpenLoop
from pigou.workload.journal import lines
from pigou.workload.offered import from_trace
from pigou.workload.trace import read_trace

LAW = "law:itl_a=0.02,itl_b=0.0002,prefill=0.004,prefill_token=0.00005"
#: As workers that sleep share it.
LINK = LinkConfig(gbps=25.0, latency_us=200.0, sharing="fifo", ends="receiver")
BLOCKS, BLOCK, SEQS, BUDGET, LONGEST = 4096, 16, 64, 2048, 2048
#: Bytes of a token's KV in the timed model (Llama-3.1-8B).
MODEL = "llama-3.1-8b"
PROMPTS = ("--input", "64:768", "--output", "32:128", "--prefixes", "4", "--prefix-length", "256")
#: Requests one after another, by which the overhead of the way is measured.
IDLE = 25
#: Of the worker that computes.
WORKER_SEQS, WORKER_BUDGET = 32, 512
WORKER_INPUT, WORKER_OUTPUT = (32, 512), (16, 128)
#: Before each load: a kernel is made for each number of rows that is computed for the first time.
WARM_UP = ("--warmup", "150", "--input", "32:512", "--output", "4")
#: Loads, as shares of the most that it does.
SHARES = (0.3, 0.5, 0.7)
#: How near the two sides should be.
NEAR = 0.15
STATISTICS = ("mean", "p50", "p90", "p99")


@dataclass(frozen=True)
class Side:
    """Figures of one side: milliseconds, and tokens a second."""

    ttft: dict[str, float]
    itl: dict[str, float]
    throughput: float

    def figures(self) -> dict[str, float]:
        """Return all of them by name."""
        both = {"ttft": self.ttft, "itl": self.itl}
        named = {f"{name} {each}": both[name][each] for name in both for each in STATISTICS}
        return named | {"tokens/s": self.throughput}


#: Live, and simulated.
Pair: TypeAlias = tuple[Side, Side]


def main() -> None:
    """Run the benchmark and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["fleet", "worker"])
    parser.add_argument("--rates", default="", help="requests a second, with commas")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each load")
    parser.add_argument("--policy", default="toll", help="of the fleet")
    parser.add_argument("--timing", default="", help="of the worker; by default it is profiled")
    parser.add_argument("--repeats", type=int, default=5, help="of each measurement of the profile")
    parser.add_argument("--rounds", type=int, default=1, help="of profile and loads (worker)")
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


# --- a fleet that sleeps ----------------------------------------------------------------------


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
    said = [call.first - call.intended for call in result.calls[-IDLE:]]
    leg = (float(np.median(waited)) - float(np.median(said)) / 1e6) / legs
    return Ways(leg, load["ttft_ms"]["p50"] - float(np.median(waited)))


def gateway_view(journal: Path) -> tuple[list[float], float]:
    """Return milliseconds from each request to its first token, and how many legs one had."""
    asked: dict[str, int] = {}
    waited: list[float] = []
    remote = 0
    for line in lines(journal):
        match line.entry:
            case Submit(id=id, now=now):
                asked.setdefault(id, now)
            case Prefilled():
                remote += 1
            case First(id=id, now=now):
                waited.append((now - asked[id]) / 1e6)
    return waited[-IDLE:], 1 + remote / len(asked)


def simulate(journal: Path, count: int, ways: Ways) -> tuple[Side, Result]:
    """Simulate a journal's arrivals; figures of the last `count` of them.

    Those before are of the load client, which asks what the endpoint can do.
    """
    head = next(lines(journal)).entry
    assert isinstance(head, Head)
    fleet = FleetConfig(
        workers=(Members(role=Role.PREFILL), Members(role=Role.DECODE, count=2)),
        link=LINK,
        overhead_ms=max(0.0, ways.overhead),
        leg_ms=max(0.0, ways.leg),
    )
    setup = Setup(model=MODEL, timing=LAW, blocks=BLOCKS, max_batched_tokens=BUDGET, max_seqs=SEQS,
                  max_model_len=LONGEST, engine="pigou")  # fmt: skip
    workload = from_trace(read_trace(journal))
    result = Simulation(workload, fleet, setup, head.config, ClientConfig()).run()
    return of_simulation(result, count), result


# --- a worker that computes -------------------------------------------------------------------


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
        os.sched_setaffinity(0, [client])  # what is started from here on inherits it
        limits = get_json(f"{url}/server_info")
        for number in range(args.rounds):
            here = folder / f"round-{number}"
            here.mkdir(exist_ok=True)
            timing = args.timing or profiled(url, here / "timing.json", args.repeats)
            for rate in list(rounds) or rates_of(args, timing):
                trace = here / f"rate-{rate:g}.jsonl"
                sessions = arrivals(rate, args.seconds, args.seed + number)
                trace.write_text("".join(json.dumps(row) + "\n" for row in sessions))
                pair = bench(url, trace), simulate_worker(trace, timing, limits)
                compare(f"{rate:.1f} requests/s", *pair)
                rounds.setdefault(rate, []).append(pair)
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


def profiled(url: str, file: Path, repeats: int) -> str:
    """Profile the worker, show what was found, and return the timing's file."""
    command = [sys.executable, "-m", "pigou", "profile", url, "--out", str(file),
               "--repeats", str(repeats)]  # fmt: skip
    print(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout, flush=True)
    return str(file)


def rates_of(args: argparse.Namespace, timing: str) -> list[float]:
    """Return the rates that were asked for, or shares of what the worker can do at most."""
    if args.rates:
        return [float(rate) for rate in args.rates.split(",")]
    lengths = Lengths(input=WORKER_INPUT, output=WORKER_OUTPUT)
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
    return of_simulation(worker_simulation(workload, timing, limits).run(), workload.jobs)


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


# --- figures ----------------------------------------------------------------------------------


def of_simulation(result: Result, count: int) -> Side:
    """Return the figures of a simulation's last `count` calls."""
    calls = sorted(result.done, key=lambda call: call.intended)[-count:]
    ttft = np.array([call.first - call.intended for call in calls])
    seconds = (max(c.last for c in calls) - min(c.intended for c in calls)) / SECOND
    itl = {"mean": result.gaps.mean()}
    values = result.gaps.percentiles(np.array([50.0, 90.0, 99.0])).tolist()
    itl |= dict(zip(STATISTICS[1:], values, strict=True))
    return Side(
        {name: 1e3 * (value or 0.0) for name, value in summary(ttft).items()},
        {name: 1e3 * value for name, value in itl.items()},
        sum(call.tokens for call in calls) / seconds,
    )


def of_bench(load: dict[str, Any]) -> Side:
    """Return the figures of `pigou bench --json`."""
    assert load["failed"] == 0, load["failures"]
    return Side(load["ttft_ms"], load["itl_ms"], load["output_tokens_per_second"])


def compare(name: str, live: Side, simulated: Side) -> None:
    """Print both sides and their ratios."""
    print(f"{name:<16}{'live':>10}{'simulated':>11}{'ratio':>7}")
    theirs = live.figures()
    for each, ours in simulated.figures().items():
        show(each, theirs[each], ours, ours / theirs[each])


def compare_rounds(name: str, pairs: Sequence[Pair]) -> None:
    """Print medians over the rounds: of both sides, and of the ratios, with their range."""
    print(f"{name:<16}{'live':>10}{'simulated':>11}{'ratio':>7}  medians of {len(pairs)} rounds")
    for each in pairs[0][0].figures():
        live, ours = np.array([[side.figures()[each] for side in pair] for pair in pairs]).T
        ratios = ours / live
        reach = f"  ({ratios.min():.2f} to {ratios.max():.2f})"
        show(each, *(float(np.median(one)) for one in (live, ours, ratios)), reach)


def show(name: str, live: float, simulated: float, ratio: float, more: str = "") -> None:
    """Print a figure of both sides, with a star where they differ by more than 15%."""
    star = "" if abs(ratio - 1.0) <= NEAR else " *"
    print(f"{name:<16}{live:>10.2f}{simulated:>11.2f}{ratio:>7.3f}{star}{more}", flush=True)


if __name__ == "__main__":
    main()
