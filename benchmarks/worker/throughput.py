"""Output tokens per second of one Pigou worker beside vLLM for CPU, over HTTP.

    python -m benchmarks.worker.throughput [--model bundled] [--model PATH] [--concurrency 1,8,32]

Same weights, same threads, prompts of 128 tokens and outputs of 64, a closed loop. Both servers are
up at once; the one that is not measured is stopped (SIGSTOP). Rounds alternate between the two, and
each figure is the median of its rounds (`--best`: the best, where a server is erratic).

    python -m benchmarks.worker.throughput --static

Outputs drawn uniformly from 8 to 256 tokens, in random order, against `transformers.generate` in
static batches of 32 (each batch runs until its longest output is done: the waste ratio is what it
computes over what was wanted). Neither side streams: a static batch answers as a whole too.

No prompt is sent to a server twice, so that none is found in its prefix cache.

vLLM is found through PIGOU_PEER_VLLM; without it only Pigou's figures are printed, and it says so.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.lib.closed_loop import Job, closed_loop, make_jobs
from benchmarks.lib.peers import PeerMissing, start_vllm
from benchmarks.lib.servers import (
    LOOPBACK,
    Server,
    available_cores,
    free_ports,
    get_json,
    machine,
    unwind_on_terminate,
)
from pigou.models import bundled_path
from tools.make_random_checkpoint import Shape, write_checkpoint

PROMPT = 128
OUTPUT = 64
#: Size of the static batches, as in `benchmarks.worker.static_batches`.
BATCH = 32
QWEN = Shape(
    family="qwen2",
    hidden=896,
    layers=24,
    heads=14,
    kv_heads=2,
    head_dim=64,
    ffn=4864,
    vocab=8192,
    tie=True,
)
#: Seeds of prompts that only warm a server up.
WARM_UP = 10**9
console = Console(width=110, highlight=False)


@dataclass(frozen=True)
class Point:
    """Rates of both sides at one concurrency, in output tokens per second, by round."""

    concurrency: int
    pigou: list[float]
    vllm: list[float]


def start_pigou(model: Path, threads: int, dtype: str, log: Path) -> Server:
    """One worker, alone."""
    port = free_ports(1)[0]
    argv = [sys.executable, "-m", "pigou", "worker", "--model", str(model), "--port", str(port)]
    argv += ["--threads", str(threads), "--dtype", dtype, "--served-model-name", model.name]
    return Server(
        argv, url=f"http://{LOOPBACK}:{port}", log=log, env={"OMP_NUM_THREADS": str(threads)}
    )


@contextmanager
def running(server: Server) -> Iterator[Server]:
    """Let a stopped server run, and stop it again."""
    server.resume()
    try:
        yield server
    finally:
        server.pause()


def vocabulary(model: Path) -> int:
    """Size of the model's vocabulary."""
    return int(json.loads((model / "config.json").read_text())["vocab_size"])


def measure(server: Server, model: str, jobs: list[Job], concurrency: int) -> float:
    """Output tokens per second of one side, the other being stopped."""
    with running(server):
        return closed_loop(server.url, model, jobs, concurrency).rate


def compare(model: Path, arguments: argparse.Namespace, logs: Path) -> list[Point]:
    """Both sides at every concurrency, in turns."""
    vocab = vocabulary(model)
    with ExitStack() as stack:
        sides: dict[str, Server] = {}
        pigou = start_pigou(model, arguments.threads, "bf16", logs / "pigou.log")
        sides["pigou"] = stack.enter_context(pigou)
        sides["pigou"].wait_healthy()
        cores = available_cores()[: arguments.threads]
        try:
            vllm = start_vllm(
                model, log=logs / "vllm.log", cores=cores, eager=not arguments.vllm_compiled,
                extra=["--dtype", "bfloat16"],
            )  # fmt: skip
            sides["vllm"] = stack.enter_context(vllm)
            vllm.wait_healthy()
        except PeerMissing as missing:
            console.print(f"without vLLM: {missing}")
        for server in sides.values():
            name = get_json(f"{server.url}/v1/models")["data"][0]["id"]
            for size in arguments.concurrency:
                warm = make_jobs(
                    size, prompt=PROMPT, output=(8, 8), vocab=vocab, seed=WARM_UP + size
                )
                closed_loop(server.url, name, warm, size)
            server.pause()
        return [
            _point(sides, model.name, concurrency, vocab, arguments)
            for concurrency in arguments.concurrency
        ]


def _point(
    sides: dict[str, Server],
    model: str,
    concurrency: int,
    vocab: int,
    arguments: argparse.Namespace,
) -> Point:
    rates: dict[str, list[float]] = {"pigou": [], "vllm": []}
    for number in range(arguments.rounds):
        count = max(concurrency * 2, arguments.least)
        for side in sorted(sides, reverse=number % 2 == 1):
            seed = 1000 * number + concurrency
            jobs = make_jobs(count, prompt=PROMPT, output=(OUTPUT, OUTPUT), vocab=vocab, seed=seed)
            rates[side].append(measure(sides[side], model, jobs, concurrency))
    return Point(concurrency, rates["pigou"], rates["vllm"])


def report(name: str, points: list[Point], best: bool) -> list[float]:
    """Print one model's table; return the ratios."""
    choose = max if best else statistics.median
    table = Table(title=f"{name}: output tok/s, {'best' if best else 'median'} of rounds")
    for column in ("concurrency", "Pigou", "vLLM", "ratio", "Pigou rounds", "vLLM rounds"):
        table.add_column(column, justify="right")
    ratios = []
    for point in points:
        ours = choose(point.pigou)
        row = [str(point.concurrency), f"{ours:.1f}", "-", "-", spread(point.pigou), "-"]
        if point.vllm:
            ratios.append(ours / choose(point.vllm))
            row[2:4] = [f"{choose(point.vllm):.1f}", f"{ratios[-1]:.2f}x"]
            row[5] = spread(point.vllm)
        table.add_row(*row)
    console.print(table)
    return ratios


def spread(rates: list[float]) -> str:
    """Least to most."""
    return f"{min(rates):.0f}..{max(rates):.0f}"


def static(model: Path, arguments: argparse.Namespace, logs: Path) -> None:
    """Against `transformers.generate`, which is run in a process of its own."""
    vocab = vocabulary(model)
    ours, theirs, wastes = [], [], []
    with start_pigou(model, arguments.threads, "bf16", logs / "static.log") as server:
        server.wait_healthy()
        warm = make_jobs(32, prompt=PROMPT, output=(8, 8), vocab=vocab, seed=WARM_UP)
        closed_loop(server.url, model.name, warm, 32)
        for seed in range(5, 5 + arguments.static_rounds):
            jobs = make_jobs(
                arguments.static_jobs, prompt=PROMPT, output=(8, 256), vocab=vocab, seed=seed
            )
            wanted = sum(job.output for job in jobs)
            wastes.append(static_tokens(jobs) / wanted)
            ours.append(closed_loop(server.url, model.name, jobs, 32, stream=False).rate)
            server.pause()
            theirs.append(wanted / transformers_seconds(model, arguments, vocab, seed))
            server.resume()
    ratio = statistics.median(ours) / statistics.median(theirs)
    console.print(
        f"{model.name}, outputs 8 to 256, {arguments.static_jobs} requests, 32 at once: "
        f"Pigou {statistics.median(ours):.1f} tok/s ({spread(ours)}), transformers.generate in "
        f"static batches {statistics.median(theirs):.1f} ({spread(theirs)}), ratio {ratio:.2f}x; "
        f"static batches compute {statistics.mean(wastes):.2f}x the tokens that were wanted"
    )


def static_tokens(jobs: list[Job]) -> int:
    """Output tokens that static batches compute for these jobs."""
    batches = (jobs[at : at + BATCH] for at in range(0, len(jobs), BATCH))
    return sum(len(batch) * max(job.output for job in batch) for batch in batches)


def transformers_seconds(
    model: Path, arguments: argparse.Namespace, vocab: int, seed: int
) -> float:
    """Seconds of `benchmarks.worker.static_batches`, without loading and warming up."""
    argv = [sys.executable, "-m", "benchmarks.worker.static_batches", str(model)]
    numbers = [arguments.threads, arguments.static_jobs, PROMPT, vocab, seed]
    argv += [str(number) for number in numbers] + [arguments.static_dtype]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", action="append", help="bundled, or a folder (repeatable)")
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--least", type=int, default=4, help="least requests of a round")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--best", action="store_true", help="best of the rounds, not the median")
    parser.add_argument("--vllm-compiled", action="store_true", help="vLLM without --enforce-eager")
    parser.add_argument("--static", action="store_true", help="against transformers.generate")
    parser.add_argument("--static-jobs", type=int, default=256)
    parser.add_argument("--static-rounds", type=int, default=1)
    parser.add_argument("--static-dtype", default="bfloat16", help="of transformers' weights")
    arguments = parser.parse_args()
    unwind_on_terminate()
    arguments.concurrency = [int(c) for c in arguments.concurrency.split(",")]
    console.print(f"{machine()}, load average {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as scratch:
        ratios = []
        for name in arguments.model or ["bundled", "qwen2-0.5b"]:
            model = find(name, Path(scratch))
            if arguments.static:
                static(model, arguments, Path(scratch))
            else:
                points = compare(model, arguments, Path(scratch))
                ratios += report(model.name, points, arguments.best or name == "bundled")
    if ratios:
        console.print(
            f"geometric mean {statistics.geometric_mean(ratios):.2f}x, least {min(ratios):.2f}x"
        )


def find(name: str, scratch: Path) -> Path:
    """The folder of a model; `qwen2-0.5b` is written, with random weights."""
    if name == "bundled":
        return bundled_path()
    if name == "qwen2-0.5b":
        write_checkpoint(scratch / name, QWEN, "bfloat16", 0)
        return scratch / name
    return Path(name)


if __name__ == "__main__":
    main()
