"""Token-PD at 128 to 512 streams: the engine core under a virtual clock, with the paper's model.

    python -m benchmarks.token_pd.scale [--streams 128 256 512] [--lost 0.1] [--seed 1]
    python -m benchmarks.token_pd.scale --measure

Step times are the roofline's of Llama-2-7B (float16, 4096 tokens) on an A100-80GB. A closed loop
keeps the streams busy; lengths are log-normal with ShareGPT's means (vLLM, 2309.06180, section
6.1). There is no attention: the returns of entries are log-normal within and across requests, and
policies see them through noise. `--measure` prints the moments on the bundled model, which `LEVEL`,
`SPREAD` and `EXPLAINED` hold. For each policy it finds the least budget in which at most `--lost`
of the return is missing when tokens are generated, and prints the figures of that run.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pigou.config import EngineConfig, EvictionConfig
from pigou.engine.core import EngineCore
from pigou.engine.plan import Plan, Result
from pigou.models.gpus import gpu, kv_blocks
from pigou.models.read import parse_architecture
from pigou.request import NEVER, SECOND, Request
from pigou.sim.timing import RooflineTiming, StepShape

Floats = NDArray[np.float64]

LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 32, "intermediate_size": 11008, "vocab_size": 32000,
    "max_position_embeddings": 4096, "torch_dtype": "float16",
}  # fmt: skip
CONTEXT, BLOCK, BATCHED = 4096, 16, 2048
PROMPT, OUTPUT, SIGMA = 161, 338, 1.0  # mean tokens; standard deviation of their logarithm
#: Standard deviations of the log return, of a request's level and of entries in it.
LEVEL, SPREAD = 0.25, 0.94
#: Share of the variance of an entry's log return that a policy's score explains; `pigou` and
#: `paper` as calibrated (docs/notes/token-eviction-trials.md), attention as `--measure` says.
EXPLAINED = {"lru": 0.11, "h2o": 0.11, "paper": 0.146, "pigou": 0.85}
POLICIES = ("full", "fifo", "lru", "h2o", "paper", "pigou")


@dataclass(slots=True)
class Stream:
    """A request in flight."""

    begun: int  # ns
    returns: Floats  # per entry, shape (prompt + output,)
    seen: Floats  # the score that the policy gives each, shape (prompt + output,)
    stored: Floats  # ns at which each was stored, shape (prompt + output,)
    kept: NDArray[np.bool_]
    sums: Floats  # sums of the first returns, shape (prompt + output,)
    missing: float = 0.0  # return of the entries that are gone
    computed: int = 0


class Run:
    """One policy, one budget of blocks, one number of streams."""

    def __init__(self, policy: str, streams: int, blocks: int, seed: int) -> None:
        eviction = None if policy == "full" else EvictionConfig(policy=policy)
        self.core = EngineCore(EngineConfig(
            blocks=blocks, block_size=BLOCK, max_seqs=streams, max_model_len=CONTEXT,
            max_batched_tokens=BATCHED, prefix_caching=False, eviction=eviction,
        ))  # fmt: skip
        self.policy, self.streams, self.config = policy, streams, eviction
        self.timing = RooflineTiming(MODEL, gpu("a100"))
        self.seed, self.numbers = seed, count()
        self.flying: dict[str, Stream] = {}
        self.rows: dict[int, Stream] = {}
        self.now = self.peak = self.tokens = 0
        self.lost = self.total = 0.0

    def __call__(self, requests: int) -> dict[str, float]:
        """Serve `requests` after as many as there are streams; return the figures."""
        for _ in range(self.streams):
            self.submit()
        latencies: list[float] = []
        begin, ended = 0, 0
        while ended < self.streams + requests:
            for name in self.step():
                ended += 1
                begun = self.flying.pop(name).begun
                if ended > self.streams:
                    latencies.append((self.now - begun) / SECOND)
                elif ended == self.streams:
                    begin, self.lost, self.total, self.peak = self.now, 0.0, 0.0, 0
                self.submit()
        return {
            "gb": (WEIGHTS + self.peak * BLOCK * MODEL.kv_bytes) / 1e9,
            "rps": requests * SECOND / (self.now - begin),
            "p95_s": float(np.quantile(latencies, 0.95)), "lost": self.lost / self.total,
        }  # fmt: skip

    def submit(self) -> None:
        """Draw a request, and let it wait."""
        number = next(self.numbers)
        rng = np.random.default_rng((self.seed, number))
        means = np.array([PROMPT, OUTPUT])
        prompt, output = np.exp(rng.normal(np.log(means) - SIGMA**2 / 2, SIGMA))
        prompt = int(np.clip(prompt, 4, CONTEXT // 2))
        output = int(np.clip(output, 4, CONTEXT // 2 - 1))
        size = prompt + output
        level, entries, noise = rng.normal(0, LEVEL), *rng.normal(0, 1, (2, size))
        share = EXPLAINED.get(self.policy, 1.0)
        # A predictor's mean: the explained part of an entry's deviation, in the unit of returns.
        guess = share * entries + np.sqrt(share * (1 - share)) * noise
        # Accumulated attention knows no level across requests.
        scores = np.exp(level * (self.policy != "h2o") + SPREAD * guess)
        if self.policy == "lru":  # seconds since an entry's last use are 0.1 / this number
            scores /= rng.exponential(size=size)
        returns = np.exp(level + SPREAD * entries)
        self.flying[str(number)] = Stream(
            self.now, returns, scores, np.zeros(size), np.ones(size, bool), returns.cumsum()
        )
        self.core.add(Request(str(number), prompt, output, arrival=self.now))

    def step(self, horizon: int = NEVER) -> list[str]:
        """Do a plan's steps, none from `horizon` on but the first; return who ended."""
        plan = self.core.schedule(self.now, horizon)
        for started in plan.started:
            stream = self.rows[started.row] = self.flying[started.request]
            stream.kept[:], stream.missing, stream.computed = True, 0.0, 0
        for cut in plan.compactions:
            self._cut(self.rows[cut.row], cut.drop)
        counts, kv_lens, samples = plan.counts, plan.kv_lens, plan.samples
        for back in plan.recomputations:
            stream = self.rows[back.row]
            gone = np.flatnonzero(~stream.kept[: stream.computed])
            back_again = gone[np.argsort(-stream.seen[gone])][: back.count]
            stream.kept[back_again] = True
            stream.missing -= stream.returns[back_again].sum()
            counts, kv_lens = np.append(counts, back.count), np.append(kv_lens, back.entries)
            samples = np.append(samples, False)
        shape = StepShape(counts.astype(np.int32), kv_lens.astype(np.int32), samples)
        ends = self.now + self.timing.durations(shape, plan.repeat).cumsum()
        ends = ends[: 1 + int((ends[:-1] < horizon).sum())]
        self._advance(plan, ends)
        self.now = int(ends[-1])
        self.peak = max(self.peak, self.core.config.blocks - self.core.free_blocks)
        result = Result(steps=len(ends))
        for row, _, blocks in plan.to_score.tolist():
            self._score(self.rows[row], row, blocks, result)
        return [ended.request for ended in self.core.apply(plan, result).finished]

    def _advance(self, plan: Plan, ends: NDArray[np.int64]) -> None:
        repeat = len(ends)
        for row, start, size in zip(
            plan.rows.tolist(), plan.starts.tolist(), plan.counts.tolist(), strict=True
        ):
            stream, stop = self.rows[row], start + size * repeat
            stream.stored[start:stop] = np.repeat(ends, size)
            stream.computed = stop
            if size == 1:  # returns that its next token reads
                self.total += repeat * stream.sums[stop - 1]
                self.lost += repeat * stream.missing

    def _scores(self, stream: Stream) -> Floats:
        """Return the policy's scores of the entries so far, shape (computed,)."""
        stored, seen = stream.stored[: stream.computed], stream.seen[: stream.computed]
        if self.policy == "fifo":
            return stored
        age = (self.now - stored) / SECOND
        if self.policy == "h2o":
            return seen * (age + 0.01)
        if self.policy == "lru":
            return self.now / SECOND - np.minimum(age, 0.1 / seen)
        return seen

    def _victims(self, stream: Stream) -> NDArray[np.int64]:
        assert self.config is not None
        most = stream.computed - self.config.recent
        may = np.arange(self.config.sinks, max(most, self.config.sinks))
        may = may[stream.kept[may]]
        return may[np.argsort(self._scores(stream)[may], kind="stable")]

    def _cut(self, stream: Stream, drop: int) -> None:
        gone = self._victims(stream)[:drop]
        stream.kept[gone] = False
        stream.missing += stream.returns[gone].sum()

    def _score(self, stream: Stream, row: int, blocks: int, result: Result) -> None:
        scores = self._scores(stream)
        order = self._victims(stream)
        order = order[: min(blocks, len(order) // BLOCK) * BLOCK]
        result.lost_returns[row] = scores[order].reshape(-1, BLOCK).sum(axis=1)
        gone = np.sort(stream.seen[: stream.computed][~stream.kept[: stream.computed]])[::-1]
        if self.policy == "paper" and len(gone) >= BLOCK:
            whole = gone[: len(gone) // BLOCK * BLOCK]
            result.regained_returns[row] = whole.reshape(-1, BLOCK).sum(axis=1)


MODEL = parse_architecture(Path("llama-2-7b"), LLAMA, "llama-2-7b")
WEIGHTS = MODEL.weight_bytes


def least(policy: str, args: argparse.Namespace, streams: int) -> dict[str, float]:
    """Return the figures at the least budget that loses at most `args.lost`."""
    room = kv_blocks(MODEL, gpu("a100"), max_batched_tokens=BATCHED, max_seqs=streams)

    def run(blocks: int) -> dict[str, float]:
        return Run(policy, streams, blocks, args.seed)(args.requests)

    best = run(room)
    low, high = streams * 6, room
    if policy == "full" or best["lost"] > args.lost:
        return best
    for _ in range(args.rounds):
        middle = (low + high) // 2
        found = run(middle)
        if found["lost"] <= args.lost:
            high, best = middle, found
        else:
            low = middle
    return best


def measure() -> None:
    """Print the moments of predicted returns on the bundled model."""
    from benchmarks.token_pd import load, run
    from pigou.models import bundled_path
    from pigou.runtime.models.load import load as load_model

    bench = run.Run(load_model(bundled_path(), "fp32", "cpu"), run.Setting("pigou", 32, 320))
    policy: Any = bench.engine.executor.evictor.policy  # type: ignore[union-attr]
    policy.compiled, scores = False, policy.scores
    found: list[Floats] = []

    def watched(rows: Any) -> Any:
        for entries, each in zip(rows, returns := scores(rows), strict=True):
            log, mass = np.log(each), np.log(entries.field("mass_all") + entries.field("mass"))
            x, y = (v - v.mean(axis=-1, keepdims=True) for v in (log, mass))
            share = (x * y).mean(axis=-1) ** 2 / (x.var(axis=-1) * y.var(axis=-1))
            found.append(np.stack((log.mean(axis=-1), log.std(axis=-1), share)))
        return returns

    policy.scores = watched
    items = load.make_items(load.Texts.unseen(bundled_path()), 64, 1, seed=7)
    bench(load.arrivals(items, float("inf"), 1, seed=7))
    level, spread, share = np.moveaxis(np.array(found), 1, 0)
    print(f"level {level.std(axis=0).mean():.2f}, spread {spread.mean():.2f}, "
          f"share that attention explains {share.mean():.2f}")  # fmt: skip


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, nargs="+", default=[128, 256, 512])
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    parser.add_argument("--requests", type=int, default=800)
    parser.add_argument("--lost", type=float, default=0.1)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--measure", action="store_true")
    args = parser.parse_args()
    if args.measure:
        measure()
        return
    print("| streams | policy | GB | req/s | P95, s | return lost |")
    for streams in args.streams:
        for policy in args.policies:
            found = least(policy, args, streams)
            cells = " | ".join(f"{found[k]:.4g}" for k in found)
            print(f"| {streams} | {policy} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
