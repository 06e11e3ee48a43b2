"""How many requests EngineCore schedules and applies in a CPU-second.

Four processes run one EngineCore each, under a virtual clock and a linear timing model; no
tensors. Requests have the prefix sharing of the Mooncake conversation trace (512-token hash ids,
split into blocks), their prompts cut so that the mean is as asked; without the trace they are
generated with like sharing. Requests are spread by prefix affinity, or round robin. Reading the
trace, spreading and building requests come before the clock starts, and so does compiling.

    python benchmarks/engine/core.py
    python benchmarks/engine/core.py --arrivals at-once --spread round-robin
    python benchmarks/engine/core.py --arrivals at-once --tenants 8    # each with a KV quota
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import random
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.lib.shared_folder import shared_folder
from pigou.config import EngineConfig, KVQuota
from pigou.engine.core import EngineCore
from pigou.engine.plan import Result
from pigou.request import NEVER, Request

#: Tokens that one hash id of the trace stands for.
ID_TOKENS = 512
TRACE = Path("traces") / "mooncake" / "conversation_trace.jsonl.zst"
#: Nanoseconds of a step, and of each of its tokens.
STEP, TOKEN = 8_000_000, 50_000


@dataclass(frozen=True, slots=True)
class Line:
    """One request of a trace: arrival in nanoseconds, lengths in tokens, hash ids."""

    arrival: int
    prompt: int
    output: int
    ids: tuple[int, ...]


@dataclass
class Tally:
    """What one core did; CPU times in seconds."""

    requests: int = 0
    cpu: float = 0.0
    warm: float = 0.0
    plans: int = 0
    steps: int = 0
    tokens: int = 0
    queries: int = 0
    hits: int = 0
    preemptions: int = 0
    events: int = 0
    parts: dict[str, float] = field(default_factory=dict)


def read_trace(count: int) -> list[Line] | None:
    """Read the first `count` requests of the trace, or None where it is not to be had."""
    path = shared_folder() / TRACE
    if not path.exists():
        return None
    import zstandard

    with path.open("rb") as file:
        text = io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(file))
        rows = [json.loads(row) for _, row in zip(range(count), text, strict=False)]
    return [
        Line(
            int(row["timestamp"]) * 1_000_000,
            row["input_length"],
            max(row["output_length"], 1),
            tuple(row["hash_ids"]),
        )
        for row in rows
    ]


def generate(count: int, seed: int) -> list[Line]:
    """Generate conversations whose turns extend one another, under a common first block."""
    rng = random.Random(seed)
    lines: list[Line] = []
    talks: list[tuple[int, ...]] = []
    fresh = 1
    for i in range(count):
        base: tuple[int, ...] = (0,)
        if talks and rng.random() < 0.5:
            base = talks.pop(rng.randrange(len(talks)))
        prompt = len(base) * ID_TOKENS + int(rng.lognormvariate(8.0, 1.0)) + 1
        more = -(-prompt // ID_TOKENS) - len(base)
        ids = base + tuple(range(fresh, fresh + more))
        fresh += more
        talks.append(ids[:-1] or (0,))
        lines.append(Line(i * 294_000_000, prompt, 1 + int(rng.expovariate(1 / 343)), ids))
    return lines


def cut(lines: list[Line], mean: int) -> list[Line]:
    """Cut prompts at the length that makes their mean `mean`."""
    low, high = 1, max(line.prompt for line in lines)
    while low < high:
        middle = (low + high + 1) // 2
        if sum(min(line.prompt, middle) for line in lines) <= mean * len(lines):
            low = middle
        else:
            high = middle - 1
    return [Line(x.arrival, min(x.prompt, low), x.output, x.ids) for x in lines]


def spread(lines: list[Line], cores: int, how: str) -> list[list[Line]]:
    """Give each core its requests."""
    shares: list[list[Line]] = [[] for _ in range(cores)]
    homes: dict[int, int] = {}
    load = [0] * cores
    for i, line in enumerate(lines):
        core = i % cores
        if how == "affine":
            known = [homes[x] for x in line.ids[1:] if x in homes]
            core = known[-1] if known else load.index(min(load))
        for x in line.ids:
            homes[x] = core
        load[core] += line.prompt
        shares[core].append(line)
    return shares


def build(lines: list[Line], block_size: int, at_once: bool, tenants: int) -> list[Request]:
    """Make requests; an id becomes one hash for each of its blocks, and one of a tenant."""
    each = ID_TOKENS // block_size
    requests = []
    for i, line in enumerate(lines):
        hashes = np.empty((len(line.ids) * each, 2), dtype=np.uint64)
        hashes[:, 0] = np.repeat(np.array(line.ids, dtype=np.uint64) + np.uint64(1), each)
        hashes[:, 1] = np.tile(np.arange(1, each + 1, dtype=np.uint64), len(line.ids))
        arrival = 0 if at_once else line.arrival
        requests.append(
            Request(
                str(i), line.prompt, line.output, hashes[: line.prompt // block_size],
                arrival=arrival, tenant=str(line.ids[-1] % max(1, tenants)),
            )
        )  # fmt: skip
    return requests


def drive(core: EngineCore, requests: list[Request], tally: Tally, timed: bool) -> None:
    """Run all requests under a virtual clock."""
    clock = time.process_time
    parts: dict[str, float] = defaultdict(float)
    begin = clock()
    now, upcoming, left = 0, 0, len(requests)
    while left:
        while upcoming < len(requests) and requests[upcoming].arrival <= now:
            core.add(requests[upcoming])
            upcoming += 1
        horizon = requests[upcoming].arrival if upcoming < len(requests) else NEVER
        before = clock() if timed else 0.0
        plan = core.schedule(now, horizon)
        between = clock() if timed else 0.0
        if not plan:
            now = horizon
            continue
        step = STEP + TOKEN * plan.tokens
        steps = max(1, min(plan.repeat, -(-(horizon - now) // step)))
        result = Result(steps=steps)
        middle = clock() if timed else 0.0
        effects = core.apply(plan, result)
        if timed:
            parts["schedule"] += between - before
            parts["driver"] += middle - between
            parts["apply"] += clock() - middle
        now += steps * step
        left -= len(effects.finished)
        tally.plans += 1
        tally.steps += steps
        tally.tokens += int(effects.tokens.sum())
        tally.events += len(effects.events)
    tally.cpu = clock() - begin
    if timed:
        parts["add"] = tally.cpu - sum(parts.values())
    tally.parts = dict(parts)


def work(lines: list[Line], config: EngineConfig, at_once: bool, timed: bool) -> Tally:
    """Warm one core up, then measure it; the body of a process."""
    requests = build(lines, config.block_size, at_once, len(config.kv_quotas))
    tally = Tally(requests=len(requests))
    start = time.process_time()
    drive(EngineCore(config), requests[:20], Tally(), False)
    tally.warm = time.process_time() - start
    core = EngineCore(config)
    drive(core, requests, tally, timed)
    core.check_integrity()
    tally.queries, tally.hits = core.stats.queried_tokens, core.stats.hit_tokens
    tally.preemptions = core.stats.preemptions
    return tally


def measure(shares: list[list[Line]], config: EngineConfig, at_once: bool, timed: bool) -> Tally:
    """Run one process a core, and add up what they did."""
    with multiprocessing.get_context("spawn").Pool(len(shares)) as pool:
        tallies = pool.starmap(work, [(s, config, at_once, timed) for s in shares], chunksize=1)
    total = Tally()
    for tally in tallies:
        for name in ("requests", "cpu", "plans", "steps", "tokens", "queries", "hits"):
            setattr(total, name, getattr(total, name) + getattr(tally, name))
        total.preemptions += tally.preemptions
        total.events += tally.events
        total.warm = max(total.warm, tally.warm)
        for part, seconds in tally.parts.items():
            total.parts[part] = total.parts.get(part, 0.0) + seconds
    return total


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=12_000)
    parser.add_argument("--tokens", type=int, default=7_000, help="mean length of a prompt")
    parser.add_argument("--cores", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=32_768, help="of 16 tokens, on each core")
    parser.add_argument("--batched", type=int, default=8_192, help="token budget of a step")
    parser.add_argument("--seqs", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=512)
    parser.add_argument("--arrivals", choices=["trace", "at-once", "both"], default="both")
    parser.add_argument("--spread", choices=["affine", "round-robin"], default="affine")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tenants", type=int, default=0, help="with a KV quota each")
    return parser.parse_args()


def report(name: str, total: Tally, detail: Tally) -> None:
    print(f"\narrivals: {name}")
    print(f"  hit ratio        {total.hits / total.queries:.3f}")
    print(f"  preemptions      {total.preemptions}")
    print(f"  plans            {total.plans} ({total.plans / total.requests:.2f} a request)")
    print(f"  steps            {total.steps}; tokens sampled {total.tokens}")
    print(f"  KV events        {total.events}")
    print(
        f"  CPU-s per 1,000  {1000 * total.cpu / total.requests:.3f}; of it, in a run with timers:"
    )
    for part, seconds in sorted(detail.parts.items(), key=lambda item: -item[1]):
        print(f"    {part:<12} {seconds / detail.cpu:6.1%}")


def main() -> int:
    args = arguments()
    lines = read_trace(args.requests)
    print("requests:", "Mooncake conversation trace" if lines else "generated")
    lines = cut(lines or generate(args.requests, 0), args.tokens)
    prompts = [line.prompt for line in lines]
    print(
        f"{len(lines)} requests, prompt mean {np.mean(prompts):.0f} (cut at {max(prompts)}), "
        f"output mean {np.mean([line.output for line in lines]):.0f}; "
        f"{args.cores} cores x {args.blocks} blocks, spread {args.spread}"
    )
    longest = max(line.prompt + line.output for line in lines)
    config = EngineConfig(
        blocks=args.blocks,
        max_seqs=args.seqs,
        max_batched_tokens=args.batched,
        max_model_len=longest,
        max_repeat=args.repeat,
        kv_quotas={
            str(tenant): KVQuota(floor=0.8 / args.tenants, ceiling=0.5)
            for tenant in range(args.tenants)
        },
    )
    shares = spread(lines, args.cores, args.spread)
    kinds = ["trace", "at-once"] if args.arrivals == "both" else [args.arrivals]
    speeds = []
    for kind in kinds:
        at_once = kind == "at-once"
        rounds = [measure(shares, config, at_once, False) for _ in range(args.rounds)]
        report(kind, rounds[0], measure(shares, config, at_once, True))
        rates = sorted(r.requests / r.cpu for r in rounds)
        speeds.append(rates[len(rates) // 2])
        each = ", ".join(f"{rate:.0f}" for rate in rates)
        print(f"  requests/CPU-s   {speeds[-1]:.0f} (median of {each})")
        print(f"  warm-up          {max(r.warm for r in rounds):.1f} CPU-s a process, not counted")
    return 0 if min(speeds) >= 4_000 else 1


if __name__ == "__main__":
    sys.exit(main())
