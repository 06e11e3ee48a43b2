"""EPLB's greedy packing beside Pigou's: imbalance of ranks, and milliseconds of a layer.

    python -m benchmarks.sim.expert_placement [--seeds 5]

256 experts under Zipf loads with Gamma noise. Both packings take turns on each layer. The bound is
what any packing of the same copies has at least.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import fmean

import numpy as np

from pigou.placement.expert_placement import (
    ExpertRanks,
    Slots,
    balance,
    imbalance,
    pack_bound,
    pack_greedy,
    rank_loads,
    replicate,
)

_RANKS = ((16, 288), (32, 288), (64, 320), (72, 288))
_EXPONENTS = (0.3, 0.8, 1.2)


def timed(make: Callable[[], Slots]) -> tuple[Slots, float]:
    """Return a placement, and its milliseconds of CPU."""
    began = time.process_time()
    made = make()
    return made, 1e3 * (time.process_time() - began)


def main() -> None:
    """Print a row for each number of ranks and exponent."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    seeds = parser.parse_args().seeds
    print("ranks slots zipf   EPLB   ours  bound  EPLB ms  ours ms")
    for ranks, slots in _RANKS:
        for exponent in _EXPONENTS:
            columns = []
            for seed in range(seeds):
                rng = np.random.default_rng(seed)
                loads = rng.permutation(np.arange(1, 257.0) ** -exponent) * rng.gamma(4, 1 / 4, 256)
                shape = ExpertRanks(ranks, slots)
                theirs, their_ms = timed(partial(balance, loads, shape, pack_greedy))
                ours, our_ms = timed(partial(balance, loads, shape))
                copies = replicate(loads, slots)
                least = pack_bound(np.repeat(loads / copies, copies), ranks)
                columns.append(
                    (imbalance(rank_loads(theirs, loads, ranks)),
                     imbalance(rank_loads(ours, loads, ranks)),
                     least / (loads.sum() / ranks) - 1.0, their_ms, our_ms)
                )  # fmt: skip
            means = [fmean(column) for column in zip(*columns, strict=True)]
            shares = " ".join(f"{value:6.2%}" for value in means[:3])
            print(f"{ranks:5} {slots:5} {exponent:4} {shares} {means[3]:8.1f} {means[4]:8.1f}")


if __name__ == "__main__":
    main()
