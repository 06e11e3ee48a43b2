#!/usr/bin/env python3
"""Paging waste: room of running requests' KV blocks that no token has.

    python -m benchmarks.engine.paging_waste [--requests 400]

Beside paged blocks, in the same run: what a contiguous buffer of each request's own final length
(prompt and `max_tokens`), and one of the longest length, would leave empty. Lengths are lognormal
(sigma 0.6) around the means; waste is token-seconds of empty room over all room, steps as time.
"""

from __future__ import annotations

import argparse

import numpy as np

from pigou.config import EngineConfig
from pigou.engine.core import EngineCore
from pigou.engine.plan import Result
from pigou.request import Request

#: Mean tokens of prompts and outputs.
MIXES = {"short": (64, 64), "chat": (512, 128), "agent": (2000, 256), "document": (6000, 400)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[16, 32])
    options = parser.parse_args()
    print(f"{'mix':<10} {'block':>5} {'paged':>7} {'own length':>11} {'longest':>8}")
    for mix, means in MIXES.items():
        for size in options.block_sizes:
            paged, own, longest = waste(means, size, options.requests)
            print(f"{mix:<10} {size:>5} {paged:>7.2%} {own:>11.1%} {longest:>8.1%}", flush=True)


def waste(means: tuple[int, int], size: int, requests: int) -> tuple[float, float, float]:
    """Return the shares of empty room: paged, of buffers of own length, of the longest length."""
    random = np.random.default_rng(size)
    sigma = 0.6
    lengths = [
        np.maximum(8, random.lognormal(np.log(mean) - sigma**2 / 2, sigma, requests)).astype(int)
        for mean in means
    ]
    prompts, outputs = (np.minimum(each, 16_000).tolist() for each in lengths)
    top = max(map(sum, zip(prompts, outputs, strict=True)))
    config = EngineConfig(
        blocks=64 * (top // size + 2), block_size=size, max_seqs=64, max_model_len=top + 1,
        max_batched_tokens=8192,
    )  # fmt: skip
    core = EngineCore(config)
    for number in range(requests):
        core.add(Request(str(number), prompts[number], outputs[number]))
    tokens = room = own = longest = 0
    now = 0
    while core.running or core.waiting:
        now += 1
        plan = core.schedule(now)
        core.apply(plan, Result())
        rows = core.rows
        used = rows.length > 0
        tokens += int(rows.computed[used].sum())
        room += int(rows.blocks[used].sum()) * size
        own += int(rows.limit[used].sum())
        longest += int(used.sum()) * top
    return 1 - tokens / room, 1 - tokens / own, 1 - tokens / longest


if __name__ == "__main__":
    main()
