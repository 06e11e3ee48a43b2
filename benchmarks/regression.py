"""How fast the working tree is, beside an earlier commit: six figures, in turns.

    python -m benchmarks.regression --against COMMIT [--only simulate,gateway] [--rounds 5]

The commit is checked out in a temporary folder. Each tree runs its own sources, benchmarks, entry
points and compiled kernels, under this Python. Figures are of CPU time, not of wall time: other
work on the machine moves them less. The trees take turns, in an order drawn anew each round; a
ratio is the working tree's speed over the commit's in the same round, so below 1 is slower. The
exit code is 1 where the median of a ratio is below 1 - `--tolerance`.

| figure | unit | what runs |
|---|---|---|
| engine | requests/CPU-s | `engine.core` of the tree: EngineCore alone, Mooncake's trace |
| decide | calls/CPU-s | `routing.throughput_pigou` of the tree: route 128 blocks, 64 workers |
| store | calls/CPU-s | the same: store 128 blocks in the prefix index, and remove them |
| simulate | requests/CPU-s | `pigou simulate`, Mooncake's trace, 4 workers, round robin |
| gateway | chunks/CPU-s | `pigou serve` before a stub, 64 streams of a chunk every 20 ms |
| worker | tokens/CPU-s | `pigou worker` with the bundled model, 8 requests at once |
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gateway.overhead import Way, cpu_seconds, measure_chunks
from benchmarks.lib.closed_loop import closed_loop, make_jobs
from benchmarks.lib.rounds import shuffled_rounds
from benchmarks.lib.servers import LOOPBACK, Server, free_ports, get_json, machine
from benchmarks.lib.shared_folder import shared_folder
from benchmarks.sim.speed import mooncake

ROOT = Path(__file__).resolve().parents[1]
#: Modules that a tree may have a benchmark in: names change.
ENGINE = ("benchmarks.engine.core", "benchmarks.core")
ROUTING = (
    ("benchmarks.routing.throughput_pigou", "benchmarks.routing.throughput_data"),
    ("benchmarks.routing_pigou", "benchmarks.routing_data"),
)
#: Runs in a tree: prints calls in a CPU-second of one measure of `Side`.
_ROUTING_PROBE = """
import importlib, sys, time
side_module, data_module, measure, argument, calls = sys.argv[1:]
data = importlib.import_module(data_module)
side = importlib.import_module(side_module).Side(data.workload(), "toll")
call = getattr(side, measure)(int(argument) if argument.isdigit() else argument)
spent = 0.0
for number in range(int(calls) + 200):  # the first ones load kernels
    began = time.process_time_ns()
    call(number)
    spent += (time.process_time_ns() - began) * (number >= 200)
    if measure == "decide":
        side.settle(number)
print(1e9 * int(calls) / spent)
"""
PROMPT, OUTPUT, CONCURRENCY = 128, 64, 8


@dataclass(frozen=True)
class Tree:
    """Sources under `root`; `metadata` is a folder of their entry points, for PYTHONPATH."""

    name: str
    root: Path
    metadata: Path

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment of a process that runs these sources."""
        paths = [self.metadata, self.root, self.root / "src", self.root / "lab" / "src"]
        kept = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
        own = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
        return kept | own | {"PIGOU_SHARED": str(shared_folder().resolve())}

    def has(self, module: str) -> bool:
        """Return whether the tree has a file of this module."""
        return (self.root / module.replace(".", "/")).with_suffix(".py").exists()

    def run(self, *argv: str) -> tuple[str, float]:
        """Run Python with these arguments; return its output, and its CPU seconds."""
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            process = subprocess.Popen(
                [sys.executable, *argv], cwd=self.root, env=self.environment, stdout=out, stderr=err
            )
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            out.seek(0), err.seek(0)
            if process.returncode not in (0, 1):  # benchmarks return 1 below a target
                raise RuntimeError(f"{self.name}: {argv} ended badly:\n{err.read()[-2000:]}")
            return out.read(), used.ru_utime + used.ru_stime

    def server(self, log: Path, *argv: str) -> Server:
        """Return a server of `pigou ARGV --port`, started."""
        port = free_ports(1)[0]
        command = [sys.executable, "-m", "pigou", *argv, "--port", str(port)]
        log = log / f"{self.name}-{argv[0]}.log"
        return Server(command, url=f"http://{LOOPBACK}:{port}", log=log, env=self.environment)


def write_metadata(root: Path, folder: Path) -> Path:
    """Write the entry points of a tree's projects as `*.dist-info` in a folder; return it."""
    for file in (root / "pyproject.toml", root / "lab" / "pyproject.toml"):
        if not file.exists():
            continue
        project = tomllib.loads(file.read_text())["project"]
        name, version = project["name"].replace("-", "_"), project.get("version", "0")
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        groups = {"console_scripts": project.get("scripts", {}), **project.get("entry-points", {})}
        lines = (
            f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in entries.items())
            for group, entries in groups.items()
        )
        (info / "entry_points.txt").write_text("\n".join(lines))
    return folder


@contextmanager
def checked_out(commit: str, folder: Path) -> Iterator[Path]:
    """Check a commit out in a worktree of its own below `folder`, and remove it at the end."""
    root = folder / "tree"
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(root), commit], check=True)
    try:
        yield root
    finally:
        subprocess.run([*git, "remove", "--force", str(root)], check=True)


Measure = Callable[[Tree], float]


def engine(tree: Tree) -> float:
    """Requests that EngineCore schedules and applies in a CPU-second."""
    module = next(filter(tree.has, ENGINE))
    out, _ = tree.run(
        "-m", module, "--requests", "4000", "--cores", "1", "--arrivals", "trace", "--rounds", "1"
    )
    found = re.search(r"requests/CPU-s +(\d+)", out)
    if found is None:
        raise RuntimeError(f"{tree.name}: {module} prints no requests/CPU-s:\n{out}")
    return float(found[1])


def routing(measure: str, argument: str, calls: int) -> Measure:
    """Calls in a CPU-second of one measure of the routing benchmark."""

    def run(tree: Tree) -> float:
        modules = next(pair for pair in ROUTING if tree.has(pair[0]))
        out, _ = tree.run("-c", _ROUTING_PROBE, *modules, measure, argument, str(calls))
        return float(out.split()[-1])

    return run


def simulate(folder: Path, requests: int) -> Measure:
    """Simulated requests in a CPU-second; start-up, that of a run of 50 requests, is left out."""
    long = mooncake(folder, requests)
    short = folder / "short.jsonl"
    short.write_text("".join(long.read_text().splitlines(keepends=True)[:50]))
    fleet = folder / "fleet.yaml"
    fleet.write_text(json.dumps({"workers": [{"role": "both", "count": 4, "block_size": 16}]}))

    def spent(tree: Tree, trace: Path) -> float:
        _, seconds = tree.run(
            "-m", "pigou", "simulate", "--workload", str(trace), "--fleet", str(fleet),
            "--model", "llama-3.1-8b", "--gpu", "h200", "--policy", "round-robin",
        )  # fmt: skip
        return seconds

    count = len(long.read_text().splitlines())
    return lambda tree: count / (spent(tree, long) - spent(tree, short))


def gateway(stack: ExitStack, trees: list[Tree], folder: Path) -> Measure:
    """Chunks that a gateway relays in a CPU-second."""
    port = free_ports(1)[0]
    argv = [sys.executable, "-m", "benchmarks.lib.stub_worker", str(port)]
    stub = Server(argv, url=f"http://{LOOPBACK}:{port}", log=folder / "stub.log")
    stack.enter_context(stub).wait_healthy()
    servers = {tree.name: tree.server(folder, "serve", "--attach", stub.url) for tree in trees}
    for server in servers.values():
        stack.enter_context(server).wait_healthy()

    def run(tree: Tree) -> float:
        server = servers[tree.name]
        way = Way(tree.name, server.url, server.pid)
        asyncio.run(measure_chunks([way], "paced", 64, 1))
        return way.chunks_per_cpu_s["paced"][0]

    return run


def worker(stack: ExitStack, trees: list[Tree], folder: Path) -> Measure:
    """Output tokens that a worker computes in a CPU-second."""
    servers = {tree.name: tree.server(folder, "worker", "--threads", "1") for tree in trees}
    for server in servers.values():
        stack.enter_context(server).wait_healthy()
    seeds = iter(range(10**6))  # no prompt is in a prefix cache

    def run(tree: Tree) -> float:
        server = servers[tree.name]
        name = get_json(f"{server.url}/v1/models")["data"][0]["id"]
        jobs = make_jobs(
            4 * CONCURRENCY, prompt=PROMPT, output=(OUTPUT, OUTPUT), vocab=400, seed=next(seeds)
        )
        before = cpu_seconds(server.pid)
        tokens = closed_loop(server.url, name, jobs, CONCURRENCY).tokens
        return tokens / (cpu_seconds(server.pid) - before)

    return run


def compare(name: str, measure: Measure, trees: list[Tree], rounds: int) -> float:
    """Print both speeds and their ratio, with quartiles; return the median ratio."""
    speeds: dict[str, list[float]] = {tree.name: [] for tree in trees}
    by_name = {tree.name: tree for tree in trees}
    for tree in trees:
        measure(tree)  # compiles kernels, fills caches
    for _, turn in shuffled_rounds(list(by_name), rounds, seed=len(name)):
        speeds[turn].append(measure(by_name[turn]))
    ours, theirs = speeds.values()
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(
        f"{name:<10}{statistics.median(ours):>12,.0f}{statistics.median(theirs):>12,.0f}"
        f"{middle:>8.3f}   {low:.3f} to {high:.3f}",
        flush=True,
    )
    return middle


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--against", required=True, metavar="COMMIT")
    parser.add_argument("--only", default="engine,decide,store,simulate,gateway,worker")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each tree, at least 3")
    parser.add_argument("--requests", type=int, default=12_031, help="of `simulate`")
    parser.add_argument("--tolerance", type=float, default=0.03)
    options = parser.parse_args()
    if options.rounds < 3:
        parser.error(f"--rounds is {options.rounds}; quartiles need at least 3")
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        before = stack.enter_context(checked_out(options.against, folder))
        trees = [
            Tree("working", ROOT, write_metadata(ROOT, folder / "working-metadata")),
            Tree("commit", before, write_metadata(before, folder / "commit-metadata")),
        ]
        measures: dict[str, Callable[[ExitStack], Measure]] = {
            "engine": lambda _: engine,
            "decide": lambda _: routing("decide", "128", 2000),
            "store": lambda _: routing("ingest", "core", 4000),
            "simulate": lambda _: simulate(folder, options.requests),
            "gateway": lambda servers: gateway(servers, trees, folder),
            "worker": lambda servers: worker(servers, trees, folder),
        }
        chosen = options.only.split(",")
        if unknown := set(chosen) - set(measures):
            parser.error(f"--only has {sorted(unknown)}; it must be of {', '.join(measures)}")
        print(", ".join(f"{name} {value}" for name, value in machine().items()))
        print(f"{'':<10}{'working':>12}{options.against[:10]:>12}{'ratio':>8}   quartiles")
        began, ratios = time.monotonic(), {}
        for figure in chosen:
            with ExitStack() as servers:
                measure = measures[figure](servers)
                ratios[figure] = compare(figure, measure, trees, options.rounds)
    slow = [name for name, ratio in ratios.items() if ratio < 1 - options.tolerance]
    print(
        f"{time.monotonic() - began:.0f} s; slower by over {options.tolerance:.0%}: {slow or '-'}"
    )
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
