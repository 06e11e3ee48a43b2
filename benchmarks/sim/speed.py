"""How fast `pigou simulate` is, beside NVIDIA's AISimulate and Dynamo's own offline replay.

    python -m benchmarks.sim.speed [--rounds 3] [--only trace,fleet,growth] [--requests N]

- `trace`: Mooncake's conversation trace (12,031 requests) on 4 aggregated workers, Llama-3.1-8B on
  H200. Pigou routes by prefixes; AISimulate's engine stack has round robin alone.
- `fleet`: 20,000 requests of 4,096 and 256 tokens on 64 workers, half of each prompt shared with
  others; both route by Dynamo's cost.
- `growth`: the same load per worker on 8 and on 256 workers: Pigou's cost of a request; on the 8
  both for as long and for as many requests.

Both simulators of a table have the same blocks and the same limit of tokens a step (`--shapes`):
these decide how much there is to do. AISimulate's own are 64 tokens a block and 8,192 a step, those
of Dynamo's replay 8,192 a step, those of `pigou simulate` 16 and 2,048.

Simulators take turns. Seconds are those that each reports for its simulation, without start-up and
without reading the trace; those of the whole process, its CPU time and memory are printed as well.
Peers are named by environment variables: PIGOU_PEER_AISIMULATE, a venv with
`pip install --pre --only-binary :all: aisimulate==VERSION` (VERSION below); PIGOU_PEER_DYNAMO, one
with ai-dynamo-runtime 1.6.1. One that is absent is skipped, with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import zstandard
from rich.console import Console
from rich.table import Table

from benchmarks.lib.peers import PeerMissing, shared
from benchmarks.lib.servers import machine

AISIMULATE = "0.13.0.dev202610270000000085"
MODEL, GPU = "llama-3.1-8b", "h200"
#: Requests of each worker and second of the made-up fleet.
RATE = 6.25
_AISIMULATE_CONFIG = """
traffic:
  source: {{type: trace, paths: [{trace}], format: mooncake, block_size: 512}}
  load: {{type: trace_timestamps}}
engine:
  mode: aggregated
  model: meta-llama/Meta-Llama-3.1-8B
  hardware: h200_sxm
  backend: vllm
  context_length: 131072
  workers:
    aggregated:
      kv_cache: {{block_size: {block}}}
      scheduler: {{max_batched_tokens: {tokens}, max_sequences: 256}}
      parallelism: {{replicas: {workers}, tensor: 1, pipeline: 1, attention_data: 1,
                     moe_tensor: 1, moe_expert: 1}}
"""


@dataclass(frozen=True)
class Took:
    """One run: requests served, seconds of the simulation, of the process, of CPU, and MiB."""

    requests: int
    wall: float
    process: float
    cpu: float
    rss: float


@dataclass(frozen=True)
class Shape:
    """Tokens in a block, and in a step at most."""

    block: int
    tokens: int

    @classmethod
    def read(cls, text: str) -> Shape:
        """Read `64x8192`."""
        block, _, tokens = text.partition("x")
        return cls(int(block), int(tokens))

    def __str__(self) -> str:
        return f"{self.block} tokens a block, {self.tokens:,} a step"


Run = Callable[[Path], Took]


def measured(
    argv: Sequence[str], folder: Path, **variables: str
) -> tuple[str, float, float, float]:
    """Run a command; return its output, and its seconds, CPU seconds and MiB at most."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **variables}  # nothing is downloaded
    began = time.perf_counter()
    with (folder / "out").open("w+") as out, (folder / "err").open("w+") as err:
        process = subprocess.Popen(argv, stdout=out, stderr=err, cwd=folder, env=environment)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - began
        out.seek(0)
        err.seek(0)
        if process.returncode:
            raise RuntimeError(f"{argv[0]} ended with {process.returncode}:\n{err.read()[-2000:]}")
        return out.read(), seconds, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def pigou(trace: Path, workers: int, policy: str, shape: Shape) -> Run:
    """The simulator of this checkout."""

    def run(folder: Path) -> Took:
        figures, fleet = folder / "figures.json", folder / "fleet.yaml"
        kind = {"role": "both", "count": workers, "block_size": shape.block}
        fleet.write_text(json.dumps({"workers": [kind]}))  # YAML as well
        argv = [
            sys.executable, "-m", "pigou", "simulate", "--workload", str(trace),
            "--fleet", str(fleet), "--model", MODEL, "--gpu", GPU, "--policy", policy,
            "--max-batched-tokens", str(shape.tokens), "--json", str(figures),
        ]  # fmt: skip
        source = Path(__file__).resolve().parents[2] / "src"  # whatever is installed
        _, process, cpu, rss = measured(argv, folder, PYTHONPATH=str(source))
        found = json.loads(figures.read_text())
        return Took(found["completed"], found["wall_s"], process, cpu, rss)

    return run


def aisimulate(trace: Path, workers: int, shape: Shape) -> Run:
    """AISimulate's engine stack."""
    home = _home("PIGOU_PEER_AISIMULATE", f"a venv with aisimulate=={AISIMULATE}")
    program = home / "bin" / "aisimulate"
    version = _version(home, "aisimulate")
    if version != AISIMULATE:
        raise PeerMissing(f"{home} has aisimulate {version}; install {AISIMULATE}")

    def run(folder: Path) -> Took:
        config = folder / "prediction.yaml"
        config.write_text(
            _AISIMULATE_CONFIG.format(
                trace=trace, workers=workers, block=shape.block, tokens=shape.tokens
            )
        )
        argv = [str(program), "predict", "-c", str(config), "--output-dir", "report", "--overwrite"]
        _, process, cpu, rss = measured(argv, folder)
        found = json.loads((folder / "report" / "prediction.json").read_text())
        return Took(found["completed_requests"], found["wall_time_ms"] / 1000, process, cpu, rss)

    return run


def dynamo(trace: Path, workers: int, shape: Shape) -> Run:
    """Dynamo's offline replay, with its KV router."""
    home = _home("PIGOU_PEER_DYNAMO", "a venv with ai-dynamo-runtime 1.6.1")

    def run(folder: Path) -> Took:
        script = Path(__file__).with_name("speed_dynamo.py")
        engine = {"block_size": shape.block, "max_num_batched_tokens": shape.tokens}
        argv = [str(home / "bin" / "python"), str(script), str(trace), str(workers)]
        argv.append(json.dumps(engine))
        out, process, cpu, rss = measured(argv, folder)
        found = json.loads(out.splitlines()[-1])
        return Took(found["completed"], found["wall_s"], process, cpu, rss)

    return run


def _home(variable: str, what: str) -> Path:
    named = os.environ.get(variable)
    if not named or not (Path(named) / "bin" / "python").exists():
        raise PeerMissing(f"{variable} is {named!r}; it must name {what}")
    return Path(named)


def _version(home: Path, package: str) -> str:
    code = f"from importlib.metadata import version; print(version({package!r}))"
    argv = [str(home / "bin" / "python"), "-c", code]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()


def mooncake(folder: Path, requests: int) -> Path:
    """Unpack the conversation trace, or its first requests."""
    packed = shared() / "traces" / "mooncake" / "conversation_trace.jsonl.zst"
    text = zstandard.ZstdDecompressor().stream_reader(packed.open("rb")).read().decode()
    trace = folder / "conversation.jsonl"
    trace.write_text("".join(text.splitlines(keepends=True)[: requests or None]))
    return trace


def made(folder: Path, workers: int, requests: int) -> Path:
    """Write a trace of 4,096 and 256 tokens; half of a prompt is one of 4 prefixes a worker."""
    rng, at, lines = random.Random(workers), 0.0, []
    for number in range(requests):
        at += rng.expovariate(RATE * workers)
        first = 4 * rng.randrange(4 * workers)
        own = 10**6 + 4 * number
        ids = [*range(first, first + 4), *range(own, own + 4)]
        lines.append(
            json.dumps(
                {"timestamp": round(at * 1000), "input_length": 4096, "output_length": 256,
                 "hash_ids": ids}
            )
        )  # fmt: skip
    trace = folder / f"fleet-{workers}.jsonl"
    trace.write_text("\n".join(lines) + "\n")
    return trace


def compare(title: str, runs: dict[str, Run], rounds: int, console: Console) -> dict[str, float]:
    """Let simulators take turns; print what each took; return the median seconds of a request."""
    took: dict[str, list[Took]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            with tempfile.TemporaryDirectory() as folder:
                took[name].append(run(Path(folder)))
    table = Table(title=title)
    for column in ("", "requests", "wall s", "of", "requests/s", "process s", "CPU s", "RSS MiB"):
        table.add_column(column, justify="left" if not column else "right")
    found = {}
    for name, some in took.items():
        walls = [each.wall for each in some]
        middle = statistics.median(walls)
        found[name] = middle / some[0].requests
        table.add_row(
            name, f"{some[0].requests:,}", f"{middle:.2f}", f"{min(walls):.2f}-{max(walls):.2f}",
            f"{some[0].requests / middle:,.0f}", _median(some, "process"), _median(some, "cpu"),
            f"{max(each.rss for each in some):.0f}",
        )  # fmt: skip
    console.print(table)
    return found


def _median(some: Sequence[Took], name: str) -> str:
    return f"{statistics.median(getattr(each, name) for each in some):.1f}"


def beside(
    title: str, ours: dict[str, Run], peer: str, make: Callable[[], Run], rounds: int,
    console: Console,
) -> None:  # fmt: skip
    """Compare with a peer, and print the ratios of speeds; without it, say why."""
    runs = dict(ours)
    try:
        runs[peer] = make()
    except PeerMissing as error:
        console.print(f"{peer} is skipped: {error}", soft_wrap=True)
    found = compare(title, runs, rounds, console)
    for name in ours:
        if peer in found:
            ratio = found[peer] / found[name]
            console.print(f"{name}: {ratio:.2f} times the requests a second of {peer}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="trace,fleet,growth")
    parser.add_argument("--requests", type=int, default=0, help="of trace and fleet; 0 for all")
    parser.add_argument("--policies", default="toll", help="of `trace`: comma-separated")
    parser.add_argument(
        "--shapes", default="64x8192,16x2048", help="of `trace`: tokens of a block and of a step"
    )
    options = parser.parse_args()
    console, only = Console(width=110), set(options.only.split(","))
    unknown = only - {"trace", "fleet", "growth"}
    if unknown:
        parser.error(f"--only has {sorted(unknown)}; it must be of trace, fleet, growth")
    console.print(machine())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "trace" in only:
            trace = mooncake(folder, options.requests)
            for shape in map(Shape.read, options.shapes.split(",")):
                on_trace(trace, shape, options.policies.split(","), options.rounds, console)
        if "fleet" in only:
            fleet, shape = made(folder, 64, options.requests or 20_000), Shape(16, 8192)
            runs = {"pigou, dynamo": pigou(fleet, 64, "dynamo", shape)}
            title, peer = f"64 workers, 4,096 + 256 tokens, {shape}", "dynamo 1.6.1, kv_router"
            beside(title, runs, peer, lambda: dynamo(fleet, 64, shape), options.rounds, console)
        if "growth" in only:
            growth(folder, options.rounds, console)


def on_trace(
    trace: Path, shape: Shape, policies: Sequence[str], rounds: int, console: Console
) -> None:
    """Mooncake's trace, beside AISimulate."""
    ours = {f"pigou, {each}": pigou(trace, 4, each, shape) for each in policies}
    title = f"Mooncake conversation, 4 workers, {MODEL} on {GPU}, {shape}"
    peer = f"aisimulate {AISIMULATE}"
    beside(title, ours, peer, lambda: aisimulate(trace, 4, shape), rounds, console)


def growth(folder: Path, rounds: int, console: Console) -> None:
    """The same load a worker on few and on many, and as many requests on the few.

    A run of 60 requests a worker on 8 of them is over before memory and caches are filled.
    """
    shape, each, few, many = Shape(16, 8192), 60, 8, 256
    loads = {
        f"{few} workers": (few, each * few),
        f"{few} workers, longer": (few, each * many),
        f"{many} workers": (many, each * many),
    }
    runs = {}
    for title, (workers, requests) in loads.items():
        place = folder / title
        place.mkdir()
        runs[title] = pigou(made(place, workers, requests), workers, "dynamo", shape)
    found = compare(f"{each} requests a worker, {shape}", runs, rounds, console)
    short, long, most = found.values()
    console.print(
        f"A request costs {most / short:.2f} times as much on {many} workers as on {few}, "
        f"{most / long:.2f} times where these serve as many requests"
    )


if __name__ == "__main__":
    main()
