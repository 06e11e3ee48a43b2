#!/usr/bin/env python3
"""Tokens per second of a model over several processes beside one, each with one thread.

    parallel.py MODEL [--size 2] [--dtype bf16] [--batch 1 8 32] [--prompt 256] [--output 32]

Rounds of both are interleaved in one run; figures are medians. The last columns are the seconds
that the sums over ranks of one decode step take alone, and their share of the step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import TYPE_CHECKING

import numpy as np

from pigou.runtime.resources import prepare_environment

if TYPE_CHECKING:
    from pigou.runtime.local_engine import LocalEngine
    from pigou.runtime.ranks import Ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--size", type=int, default=2)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--output", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    prepare_environment(1)
    from pigou.config import EngineConfig
    from pigou.runtime.local_engine import LocalEngine
    from pigou.runtime.models.load import load
    from pigou.runtime.ranks import Ranks
    from pigou.runtime.resources import set_threads

    set_threads(1)
    length = options.prompt + options.output
    config = EngineConfig(
        blocks=(length // 16 + 2) * max(options.batch),
        max_seqs=max(options.batch),
        max_batched_tokens=max(2048, options.prompt),
        max_model_len=length,
        max_repeat=8,
        prefix_caching=False,
    )
    settings = {"model": options.model, "dtype": options.dtype}
    ranks = Ranks(options.size, settings)
    shared = ranks.load()
    engines = [LocalEngine(load(**settings), config), LocalEngine(shared, config)]
    print(f"{'':>5} {'prefill tok/s':>24} {'decode tok/s':>24} {'sums':>14}")
    print(f"{'batch':>5} {'1':>8} {options.size:>8} {'ratio':>6} {'1':>8} {options.size:>8} "
          f"{'ratio':>6} {'ms':>8} {'share':>5}")  # fmt: skip
    try:
        for batch in options.batch:
            rounds = [
                [once(engine, batch, options) for engine in engines] for _ in range(options.rounds)
            ]
            (p1, d1), (p2, d2) = (
                [statistics.median(times) for times in zip(*taken, strict=True)]
                for taken in zip(*rounds, strict=True)
            )
            tokens, spent = batch * options.prompt, sums(engines[1], ranks, batch, options)
            print(f"{batch:>5} {tokens / p1:>8,.0f} {tokens / p2:>8,.0f} {p1 / p2:>6.2f} "
                  f"{batch / d1:>8,.1f} {batch / d2:>8,.1f} {d1 / d2:>6.2f} "
                  f"{spent * 1e3:>8.2f} {spent / d2:>5.0%}", flush=True)  # fmt: skip
    finally:
        ranks.close()


def once(engine: LocalEngine, batch: int, options: argparse.Namespace) -> tuple[float, float]:
    """Return seconds of a batch's prefill, and of one decode step."""
    from pigou.request import SamplingParams

    rng = np.random.default_rng(batch)
    params = SamplingParams(max_tokens=options.output, temperature=0.0, ignore_eos=True)
    vocab = engine.executor.model.config.vocab
    prompts = rng.integers(3, vocab, size=(batch, options.prompt))
    outputs = [engine.add(prompt, params) for prompt in prompts]
    began = time.perf_counter()
    while not all(output.tokens for output in outputs):
        engine.step()
    prefilled = time.perf_counter()
    before = sum(len(output.tokens) for output in outputs)
    while any(output.reason is None for output in outputs):
        engine.step()
    steps = (batch * options.output - before) / batch
    return prefilled - began, (time.perf_counter() - prefilled) / steps


def sums(engine: LocalEngine, ranks: Ranks, batch: int, options: argparse.Namespace) -> float:
    """Return the median seconds of a decode step's sums over the ranks, measured within it."""
    group, spent = ranks.group, []
    assert group is not None
    plain = group.all_reduce

    def timed(x):  # type: ignore[no-untyped-def]
        began = time.perf_counter()
        result = plain(x)
        spent.append(time.perf_counter() - began)
        return result

    group.all_reduce = timed  # type: ignore[method-assign]
    once(engine, batch, options)
    group.all_reduce = plain  # type: ignore[method-assign]
    count = 2 * engine.executor.model.config.layers
    decode = spent[-(len(spent) // count // 2) * count :]
    each = [sum(decode[at : at + count]) for at in range(0, len(decode), count)]
    return statistics.median(each)


if __name__ == "__main__":
    main()
