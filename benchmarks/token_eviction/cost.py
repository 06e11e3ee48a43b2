#!/usr/bin/env python3
"""What token eviction adds to a decode step: step times with and without it, and where they go.

    cost.py [--streams 256] [--entries 512] [--interval 64] [--threads 1] [--policy h2o]

Every stream has as many cache entries with eviction as without it. With it, each stream is
appraised once every `interval` tokens, and then gives up as many entries as it has gained. Steps
with and without are taken in turns. Times are the processor's. `mass` is what the attention
kernels take longer, by subtraction.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from pigou.runtime.resources import prepare_environment

if TYPE_CHECKING:
    from pigou.config import EvictionConfig
    from pigou.engine.plan import Plan
    from pigou.runtime.executor import TorchExecutor
    from pigou.runtime.models.load import LoadedModel

SIZE = 16
#: Processor time of all threads: what other processes take meanwhile does not count.
CLOCK = time.process_time
POLICIES = ["streaming", "fifo", "lru", "h2o", "snapkv"]


@dataclass
class Streams:
    """An executor whose streams all decode."""

    executor: TorchExecutor
    tables: np.ndarray  # block tables
    entries: np.ndarray
    next: np.ndarray  # position of each stream's next token
    seconds: dict[str, float] = field(default_factory=dict)  # taken by each part so far

    def timed(self, name: str, part: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that adds to a part's seconds what it takes."""

        def run(*arguments: Any) -> Any:
            began = CLOCK()
            try:
                return part(*arguments)
            finally:
                took = CLOCK() - began
                self.seconds[name] = self.seconds.get(name, 0.0) + took

        return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--entries", type=int, default=512)
    parser.add_argument("--interval", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--policy", nargs="+", default=POLICIES)
    options = parser.parse_args()
    prepare_environment(options.threads)
    from pigou.config import EvictionConfig
    from pigou.models import bundled_path
    from pigou.runtime.models.load import load
    from pigou.runtime.resources import set_threads

    set_threads(options.threads)
    model = load(options.model or bundled_path(), options.dtype)
    print(f"{options.streams} streams of {options.entries} entries, ms a step (median of steps)")
    names = ["prepare", "appraise", "compact", "mass"]
    print(f"{'policy':>10} {'off':>7} {'on':>7} {'share':>6} " + " ".join(f"{n:>9}" for n in names))
    for policy in options.policy:
        off = make(model, None, options)
        on = make(model, EvictionConfig(policy=policy, interval=options.interval), options)
        report(policy, *measure(off, on, options), on, names)


def make(
    model: LoadedModel, eviction: EvictionConfig | None, options: argparse.Namespace
) -> Streams:
    """Fill caches with numbers as keys and values have them, without computing prompts."""
    import torch

    from pigou.engine.plan import Load, Started
    from pigou.request import SamplingParams

    length = options.entries + 2 * options.interval
    wide = -(-length // SIZE)
    longest = options.entries + options.steps + 2 * options.interval + 1
    if longest > model.config.context:
        raise SystemExit(f"entries and steps need a context of {longest} tokens")
    tables = np.arange(options.streams * wide, dtype=np.int32).reshape(options.streams, wide)
    cache = model.cache(tables.size, SIZE)
    cache.data.normal_(generator=torch.Generator().manual_seed(0))
    executor = model.executor(cache, tables, longest, eviction)
    held = options.entries + np.arange(options.streams, dtype=np.int32) % options.interval
    streams = Streams(executor, tables, held, held.copy())
    params = SamplingParams(
        max_tokens=options.steps + options.interval + 1, temperature=0.0, ignore_eos=True
    )
    started, loads = [], []
    for row, count in enumerate(held.tolist()):
        executor.add(str(row), [5] * (count + 1), params, b"")
        started.append(Started(str(row), row, count))
        loads.append(Load(str(row), row, 0, tables[row, : -(-count // SIZE)]))
    executor.execute(plan(streams, rows=0, loads=loads))
    executor.execute(plan(streams, rows=0, started=started))
    evictor = executor.evictor
    if evictor is not None:
        evictor.begin_step = streams.timed("prepare", evictor.begin_step)  # type: ignore
        evictor.end_plan = streams.timed("appraise", evictor.end_plan)  # type: ignore
        evictor.begin_plan = streams.timed("compact", evictor.begin_plan)  # type: ignore
    return streams


def plan(streams: Streams, rows: int, **changes: Any) -> Plan:
    from pigou.engine.plan import Plan

    return Plan(
        rows=np.arange(rows, dtype=np.int32),
        starts=streams.next[:rows].copy(),
        counts=np.ones(rows, dtype=np.int32),
        kv_lens=streams.entries[:rows].copy(),
        samples=np.ones(rows, dtype=np.bool_),
        **changes,
    )


def step(streams: Streams, options: argparse.Namespace) -> float:
    """Compute one step; streams that have gained an interval's entries give them up."""
    from pigou.engine.plan import Compaction

    full = np.flatnonzero(streams.entries == options.entries + options.interval)
    tasks, none = [], np.empty((0, 2), dtype=np.int32)
    drop = options.interval // SIZE * SIZE
    for row in full.tolist():
        count = int(streams.entries[row])
        blocks = streams.tables[row, : -(-count // SIZE)]
        if streams.executor.evictor is not None:
            tasks.append(Compaction(row, count, 0, drop, none, blocks))
    streams.entries[full] -= drop
    soon = np.flatnonzero(streams.entries == options.entries + options.interval - 1)
    asked = [[row, 0, 2 * drop // SIZE] for row in soon.tolist()]
    to_score = np.array(asked, dtype=np.int32).reshape(-1, 3)
    task = plan(streams, options.streams, compactions=tasks, to_score=to_score)
    began = CLOCK()
    streams.executor.execute(task)
    took = CLOCK() - began
    streams.entries += 1
    streams.next += 1
    return took


def measure(
    off: Streams, on: Streams, options: argparse.Namespace
) -> tuple[list[float], list[float]]:
    """Return seconds of steps without and with eviction, taken in turns.

    Steps of the first interval do not count: each stream is appraised for the first time in them,
    and all its entries are new to the policy.
    """
    without, within = [], []
    for number in range(options.interval + options.steps):
        if number == options.interval:
            on.seconds.clear()
        times = step(off, options), step(on, options)
        if number >= options.interval:
            without.append(times[0])
            within.append(times[1])
    return without, within


def report(
    policy: str,
    without: list[float],
    within: list[float],
    on: Streams,
    names: list[str],
) -> None:
    base, whole = float(np.median(without)), float(np.median(within))
    parts = {name: on.seconds.get(name, 0.0) / len(within) for name in names}
    parts["mass"] = whole - base - sum(parts.values())
    share = (whole - base) / whole
    cells = " ".join(f"{parts[name] * 1e3:>9.3f}" for name in names)
    print(f"{policy:>10} {base * 1e3:>7.2f} {whole * 1e3:>7.2f} {share:>6.1%} {cells}", flush=True)


if __name__ == "__main__":
    main()
