"""Routing policies on a live fleet, side by side: hit rate, TTFT and ITL on a replayed trace.

``python -m benchmarks.live.routing --trace agent-sessions.tar.zst`` starts workers, and in turns a
gateway with each policy before them, which gets the same sessions (with other tokens, so that
nothing is left from the run before). ``--fleet 1p2d`` and ``2both`` are Pigou's own workers with
the bundled model; ``2vllm`` two plain vLLM workers (PIGOU_PEER_VLLM) with the same weights.
``--model 75m`` makes a Llama of 75 M parameters with random weights, on which prompts take long
enough that TTFT is compute, and not what the machine did meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.lib.rounds import shuffled_rounds
from benchmarks.lib.servers import (
    LOOPBACK,
    Server,
    free_ports,
    get_text,
    machine,
    unwind_on_terminate,
)
from pigou.models import bundled_path
from pigou.workload.trace import Trace, TraceSession
from pigou.workload.trace_formats import read_trace
from tools.make_random_checkpoint import Shape, write_checkpoint

FLEETS = {"1p2d": ["prefill", "decode", "decode"], "2both": ["both"] * 2, "4both": ["both"] * 4}
LLAMA_75M = Shape(
    hidden=768, layers=12, heads=12, kv_heads=4, head_dim=64, ffn=2048, max_len=2048, tie=True
)
#: A worker computes the prompt tokens that it looked up, found neither here nor elsewhere.
_COUNTERS = {
    "vllm:prefix_cache_queries_total": 1.0,
    "vllm:prefix_cache_hits_total": -1.0,
    "vllm:external_prefix_cache_hits_total": -1.0,
}


@dataclass(frozen=True)
class Run:
    """What one policy did with the trace once: milliseconds, and shares."""

    policy: str
    hit_rate: float
    ttft_p50: float
    ttft_p99: float
    itl_p99: float
    e2e_mean: float
    failed: int


def main() -> None:
    """Run the benchmark and print its table."""
    args = _arguments()
    unwind_on_terminate()
    sessions = _chosen(args)
    turns = sum(len(each.turns) for each in sessions.sessions)
    print("machine:", machine())
    pace = f"{args.rate} sessions a second" if args.rate else f"{args.concurrency} at once"
    print(f"{len(sessions.sessions)} sessions, {turns} requests, {pace}")
    runs: list[Run] = []
    with tempfile.TemporaryDirectory() as folder, fleet(args, Path(folder)) as workers:
        first = write(sessions, Path(folder) / "warm", "warm")
        run(args, args.policy[0], workers, first, Path(folder))  # compiles, fills caches
        for number, policy in shuffled_rounds(args.policy, args.rounds, args.seed):
            name = f"{number}-{policy}"
            path = write(sessions, Path(folder) / name, name)
            runs.append(run(args, policy, workers, path, Path(folder)))
            print(runs[-1], flush=True)
    report(runs, args.policy)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fleet", choices=[*FLEETS, "2vllm"], default="1p2d")
    parser.add_argument("--policy", action="append", default=None)
    parser.add_argument("--trace", required=True)
    parser.add_argument("--scale", type=float, default=1 / 64)
    parser.add_argument("--speed", type=float, default=200.0)
    parser.add_argument("--sessions", type=int, default=48)
    parser.add_argument("--turns", type=int, default=12, help="most turns of a session")
    parser.add_argument("--concurrency", type=int, default=16, help="sessions at once")
    parser.add_argument("--rate", type=float, default=0.0, help="sessions a second, in its place")
    parser.add_argument("--blocks", type=int, default=600, help="KV blocks of a worker")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="", help="folder, or 75m; by default the bundled model")
    parser.add_argument("--timing", default="", help="workers sleep by it, and compute nothing")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.policy = args.policy or ["round-robin", "least-loaded", "toll"]
    return args


def _chosen(args: argparse.Namespace) -> Trace:
    trace = read_trace(args.trace).scaled(args.scale, args.speed).fitting(2000)
    many = [each for each in trace.sessions if len(each.turns) >= 4]
    picks = np.random.default_rng(args.seed).permutation(len(many))[: args.sessions]
    cut = [
        TraceSession(0.0, many[i].scope, many[i].turns[: args.turns])
        for i in sorted(picks.tolist())
    ]
    return Trace(trace.block, tuple(cut))


def write(trace: Trace, path: Path, name: str) -> Path:
    """Write a trace as agent sessions whose scope is of this run alone; return the folder."""
    path.mkdir(parents=True)
    size = 1000  # blocks of the scaled trace need not have whole lengths
    for number, session in enumerate(trace.sessions):
        rows = [
            {
                "in": round(turn.input * size / trace.block),
                "out": round(turn.output * size / trace.block),
                "hash_ids": list(turn.blocks),
                "think_time": turn.think,
            }
            for turn in session.turns
        ]
        whole = {"id": f"{name}/{session.scope}", "block_size": size, "requests": rows}
        (path / f"{number:04}.json").write_text(json.dumps(whole))
    (path / "scale").write_text(str(trace.block / size))
    return path


@contextmanager
def fleet(args: argparse.Namespace, folder: Path) -> Iterator[list[str]]:
    """Start the workers; yield what ``--attach`` wants of each."""
    if args.model == "75m":
        args.model = str(folder / "75m")
        write_checkpoint(Path(args.model), LLAMA_75M, "bfloat16", 0)
    with ExitStack() as stack:
        if args.fleet == "2vllm":
            found = _vllm_workers(args, folder, stack)
        else:
            found = _own_workers(args, folder, stack)
        yield found


def _own_workers(args: argparse.Namespace, folder: Path, stack: ExitStack) -> list[str]:
    roles = FLEETS[args.fleet]
    ports = free_ports(len(roles))
    servers = []
    for role, port in zip(roles, ports, strict=True):
        argv = [sys.executable, "-m", "pigou", "worker", "--role", role, "--port", str(port),
                "--threads", "1", "--blocks", str(args.blocks),
                "--block-size", str(args.block_size)]  # fmt: skip
        argv += ["--model", args.model] if args.model else []
        argv += ["--timing", args.timing] if args.timing else []
        argv += getattr(args, "worker", [])
        url = f"http://{LOOPBACK}:{port}"
        servers.append(stack.enter_context(Server(argv, url=url, log=folder / f"{port}.log")))
    for server in servers:
        server.wait_healthy()
    return [f"{s.url},role={role}" for s, role in zip(servers, roles, strict=True)]


def _vllm_workers(args: argparse.Namespace, folder: Path, stack: ExitStack) -> list[str]:
    peer = Path(os.environ["PIGOU_PEER_VLLM"])
    model = args.model or str(bundled_path())
    servers = []
    for _ in range(2):
        port, events = free_ports(2)
        config = {"enable_kv_cache_events": True, "publisher": "zmq",
                  "endpoint": f"tcp://*:{events}", "topic": "kv"}  # fmt: skip
        argv = [str(peer / "bin" / "vllm"), "serve", model, "--port", str(port), "--host", LOOPBACK,
                "--enforce-eager", "--dtype", "bfloat16" if args.model else "float32",
                "--max-model-len", "2048",
                "--block-size", "32", "--num-gpu-blocks-override", str(args.blocks // 2),
                "--kv-events-config", json.dumps(config),
                "--served-model-name", "bundled"]  # fmt: skip
        env = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
               "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}  # fmt: skip
        url = f"http://{LOOPBACK}:{port}"
        server = Server(argv, url=url, log=folder / f"{port}.log", env=env)
        servers.append((stack.enter_context(server), f"tcp://{LOOPBACK}:{events}"))
    for server, _ in servers:
        server.wait_healthy()
    return [f"{server.url},events={events},topic=kv" for server, events in servers]


def run(
    args: argparse.Namespace, policy: str, workers: Sequence[str], trace: Path, folder: Path
) -> Run:
    """Put a gateway with this policy before the workers, and replay the trace."""
    (port,) = free_ports(1)
    argv = [sys.executable, "-m", "pigou", "serve", "--policy", policy, "--port", str(port)]
    for worker in workers:
        argv += ["--attach", worker]
    url = f"http://{LOOPBACK}:{port}"
    urls = [worker.split(",")[0] for worker in workers]
    scale = (trace / "scale").read_text()
    out = folder / "bench.json"
    with Server(argv, url=url, log=folder / "gateway.log") as gateway:
        gateway.wait_healthy()
        before = _counted(urls)
        bench = [sys.executable, "-m", "pigou", "bench", url, "--trace", str(trace),
                 "--trace-scale", scale, "--json", str(out)]  # fmt: skip
        if args.rate:
            bench += ["--rate", str(args.rate)]
        else:
            bench += ["--concurrency", str(args.concurrency)]
        subprocess.run(bench, check=False, stdout=subprocess.DEVNULL)
        after = _counted(urls)
    found = json.loads(out.read_text())
    return Run(
        policy,
        1.0 - (after - before) / found["prompt_tokens"],
        found["ttft_ms"]["p50"],
        found["ttft_ms"]["p99"],
        found["itl_ms"]["p99"],
        found["e2e_ms"]["mean"],
        found["failed"],
    )


def _counted(urls: Sequence[str]) -> float:
    """Prompt tokens that were computed, on any worker."""
    total = 0.0
    for url in urls:
        for line in get_text(url + "/metrics").splitlines():
            share = _COUNTERS.get(line.split("{")[0].split(" ")[0])
            if share is not None:
                total += share * float(line.rsplit(" ", 1)[1])
    return total


def report(runs: Sequence[Run], policies: Sequence[str]) -> None:
    """Print the median of each policy's runs, and ratios to the last policy."""
    names = ("hit_rate", "ttft_p50", "ttft_p99", "itl_p99", "e2e_mean")
    print(f"\n{'policy':16}" + "".join(f"{name:>12}" for name in names) + "  failed")
    for policy in policies:
        mine = [each for each in runs if each.policy == policy]
        values = [float(np.median([getattr(each, name) for each in mine])) for name in names]
        shown = "".join(f"{value:12.3f}" for value in values)
        print(f"{policy:16}{shown}  {sum(each.failed for each in mine)}")


if __name__ == "__main__":
    main()
