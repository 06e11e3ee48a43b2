"""How far simulated latencies are from those that vLLM logged.

Replays a log of vLLM (arrivals and lengths) through EngineCore under a virtual clock, with the
layer tables of the same GPU and model as its timing, and prints TTFT, TPOT and end-to-end
latency of both beside each other. No figure of the log but its arrivals and lengths, and the
number of blocks that vLLM printed when it started, enters the simulation.

    python benchmarks/sim/accuracy.py
    python benchmarks/sim/accuracy.py --timing roofline --blocks auto
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.lib.shared_folder import shared_folder
from pigou.config import EngineConfig
from pigou.engine.core import EngineCore
from pigou.engine.plan import Plan, Result
from pigou.models.gpus import gpu, kv_blocks
from pigou.models.read import architecture
from pigou.request import NEVER, SECOND, Request
from pigou.sim.timing import RooflineTiming, StepShape, Timing
from pigou.sim.timing_profile import profile

SHARED = shared_folder()
PROFILES = SHARED / "profiles" / "vllm-0.19"
LOG = PROFILES / "logs" / "RTX4090" / "Llama-3.1-8B" / "vllm"
#: Allowed errors in percent: of the means, and of every P95.
MEAN_LIMITS, P95_LIMIT = {"TTFT": 5.0, "TPOT": 2.0, "end to end": 3.0}, 8.0


@dataclass(frozen=True, slots=True)
class Line:
    """One request of a log: seconds since the first arrival, tokens, and what vLLM needed."""

    arrival: float
    prompt: int
    output: int
    ttft: float
    tpot: float
    total: float


@dataclass(slots=True)
class Track:
    """When a simulated request had its first and its last token, in nanoseconds."""

    first: int = 0
    last: int = 0
    tokens: int = 0


@dataclass
class Run:
    """What a simulation did."""

    tracks: list[Track]
    steps: int = 0
    plans: int = 0
    preemptions: int = 0
    end: int = 0
    wall: float = 0.0
    busy: list[int] = field(default_factory=list)


def read_log(path: Path) -> list[Line]:
    """Read requests.jsonl; latencies count from when the engine had the request (queued_ts)."""
    rows = [json.loads(row) for row in path.read_text().splitlines()]
    begin = min(row["arrival_time"] for row in rows)
    return [
        Line(
            row["arrival_time"] - begin,
            row["input_toks"],
            row["output_toks"],
            row["first_token_ts"] - row["queued_ts"],
            (row["last_token_ts"] - row["first_token_ts"]) / max(row["output_toks"] - 1, 1),
            row["last_token_ts"] - row["queued_ts"],
        )
        for row in sorted(rows, key=lambda row: row["arrival_time"])
    ]


def build(lines: list[Line], block_size: int) -> list[Request]:
    """Make requests that share nothing with one another, but find their own blocks again."""
    requests = []
    for i, line in enumerate(lines):
        full = (line.prompt + line.output) // block_size
        hashes = np.empty((full, 2), dtype=np.uint64)
        hashes[:, 0], hashes[:, 1] = i + 1, np.arange(1, full + 1)
        requests.append(
            Request(
                str(i), line.prompt, line.output, hashes[: line.prompt // block_size],
                arrival=int(line.arrival * SECOND),
            )
        )  # fmt: skip
    return requests


class Replay:
    """One engine under a virtual clock."""

    def __init__(self, core: EngineCore, timing: Timing, lag: bool) -> None:
        """Make one with an empty engine.

        Args:
            lag: schedule as vLLM's asynchronous scheduler: a step is decided when the one
                before it begins, so that a request that arrives during a step is computed from
                the second step after it.
        """
        self.core, self.timing, self.lag = core, timing, lag
        self.rows: dict[int, str] = {}

    def run(self, requests: list[Request]) -> Run:
        """Run all requests, in the order of their arrival."""
        core = self.core
        run = Run([Track() for _ in requests])
        began = time.perf_counter()
        now, seen, upcoming, left = 0, 0, 0, len(requests)
        while left:
            while upcoming < len(requests) and requests[upcoming].arrival <= seen:
                core.add(requests[upcoming])
                upcoming += 1
            horizon = requests[upcoming].arrival if upcoming < len(requests) else NEVER
            plan = core.schedule(now, horizon)
            if not plan:
                now = seen = max(now, horizon)
                continue
            batch = StepShape(plan.counts, plan.kv_lens, plan.samples)
            times = self.timing.durations(batch, plan.repeat)
            ends = now + np.cumsum(times)
            steps = self._steps(ends, times, horizon)
            left -= self._take(run, plan, ends[:steps])
            seen = int(ends[steps - 1] - times[steps - 1]) if self.lag else int(ends[steps - 1])
            now = int(ends[steps - 1])
            run.plans += 1
            run.steps += steps
        run.preemptions, run.end = core.stats.preemptions, now
        run.wall = time.perf_counter() - began
        return run

    def _steps(self, ends: np.ndarray, times: np.ndarray, horizon: int) -> int:
        """How many steps pass before a new request is seen."""
        known = ends - times if self.lag else ends
        return min(int(np.searchsorted(known, horizon)) + 1, len(ends))

    def _take(self, run: Run, plan: Plan, ends: np.ndarray) -> int:
        """Apply a result, and note the tokens."""
        for started in plan.started:
            self.rows[started.row] = started.request
        owners = [self.rows[row] for row in plan.rows.tolist()]
        effects = self.core.apply(plan, Result(steps=len(ends), durations=ends))
        for owner, tokens in zip(owners, effects.tokens.tolist(), strict=True):
            if not tokens:
                continue
            track = run.tracks[int(owner)]
            if not track.tokens:
                track.first = int(ends[0])
            track.tokens += tokens
            track.last = int(ends[tokens - 1])
        return len(effects.finished)


def summary(values: list[float]) -> tuple[float, float, float]:
    """Mean, median and 95th percentile."""
    array = np.array(values)
    return float(array.mean()), float(np.median(array)), float(np.percentile(array, 95))


def report(lines: list[Line], run: Run) -> bool:
    """Print both sides; returns whether all limits hold."""
    logged = {
        "TTFT": [line.ttft for line in lines],
        "TPOT": [line.tpot for line in lines],
        "end to end": [line.total for line in lines],
    }
    ours = {
        "TTFT": [t.first / SECOND - x.arrival for t, x in zip(run.tracks, lines, strict=True)],
        "TPOT": [(t.last - t.first) / SECOND / max(t.tokens - 1, 1) for t in run.tracks],
        "end to end": [t.last / SECOND - x.arrival for t, x in zip(run.tracks, lines, strict=True)],
    }
    good = True
    print(f"\n{'ms':<20}{'vLLM':>12}{'simulated':>12}{'error':>9}{'limit':>9}")
    for name, values in logged.items():
        pairs = zip(("mean", "P50", "P95"), summary(values), summary(ours[name]), strict=True)
        for label, theirs, mine in pairs:
            error = 100.0 * (mine / theirs - 1.0)
            limit = {"mean": MEAN_LIMITS[name], "P95": P95_LIMIT}.get(label)
            good &= limit is None or abs(error) <= limit
            bound = f"{limit:.0f} %" if limit else ""
            head = f"{name} {label}"
            print(f"{head:<20}{theirs * 1e3:>12.1f}{mine * 1e3:>12.1f}{error:>+8.2f}%{bound:>9}")
    return good


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--log", type=Path, default=LOG, help="folder with requests.jsonl")
    parser.add_argument("--profile", type=Path, default=PROFILES)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--gpu", default="rtx4090")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--timing", choices=["profile", "roofline"], default="profile")
    parser.add_argument("--blocks", default="2588", help="as vLLM printed, or auto")
    parser.add_argument("--max-batched-tokens", type=int, default=2048)
    parser.add_argument("--max-seqs", type=int, default=256)
    parser.add_argument("--synchronous", action="store_true", help="vLLM's older scheduling")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    model, device = architecture(args.model), gpu(args.gpu)
    if args.timing == "profile":
        timing = profile(args.profile, model, device, args.tp)
    else:
        timing = RooflineTiming(model, device, args.tp)
    estimate = kv_blocks(
        model, device, args.tp, max_batched_tokens=args.max_batched_tokens, max_seqs=args.max_seqs
    )
    blocks = estimate if args.blocks == "auto" else int(args.blocks)
    print(f"{model.name} on {args.tp} x {device.name}, timing {args.timing}")
    print(f"blocks {blocks} of 16 tokens (memory arithmetic gives {estimate})")
    lines = read_log(args.log / "requests.jsonl")
    config = EngineConfig(
        blocks=blocks,
        max_seqs=args.max_seqs,
        max_batched_tokens=args.max_batched_tokens,
        max_model_len=max(line.prompt + line.output for line in lines),
        max_repeat=512,
        headroom=0,
    )
    replay = Replay(EngineCore(config), timing, lag=not args.synchronous)
    run = replay.run(build(lines, config.block_size))
    print(
        f"{len(lines)} requests, {run.steps} steps in {run.plans} plans, "
        f"{run.preemptions} preemptions, {run.end / SECOND:.1f} s in {run.wall:.2f} s"
    )
    good = report(lines, run)
    print("within all limits" if good else "NOT within all limits")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
