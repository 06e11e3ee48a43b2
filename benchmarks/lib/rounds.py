"""The order in which a benchmark's contenders take turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np


def shuffled_rounds(names: Sequence[str], rounds: int, seed: int) -> Iterator[tuple[int, str]]:
    """Yield (round, name): each name once a round, in an order that each round draws anew."""
    order = np.random.default_rng(seed)
    for number in range(rounds):
        for place in order.permutation(len(names)).tolist():
            yield number, names[place]
