"""What the routing benchmark holds and asks for: the same on both sides, from one seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

WORKERS = 64
BLOCK_SIZE = 16
SHORT, LONG = 128, 8192
#: Sequences of either length: 200,192 different blocks.
SHORTS, LONGS = 156, 22
#: Workers that hold each short sequence.
SHORT_HOLDERS = 16
#: Sequences of `SHORT` blocks that come and go while ingestion is measured.
PASSING = 64
VOCABULARY = 150_000

Tokens = NDArray[np.uint32]


@dataclass(frozen=True)
class Workload:
    """Token ids: `short` and `long` are held, `passing` and `strange` are not."""

    short: list[Tokens]
    long: list[Tokens]
    passing: list[Tokens]
    strange: dict[int, Tokens]

    def prompts(self, blocks: int) -> list[Tokens]:
        """The held sequences of a length."""
        return self.short if blocks == SHORT else self.long

    def held(self) -> Iterator[tuple[Tokens, list[int]]]:
        """Each sequence with its holders: the first long one is everywhere, the others on one."""
        for i, tokens in enumerate(self.short):
            yield tokens, [(i + 4 * k) % WORKERS for k in range(SHORT_HOLDERS)]
        for i, tokens in enumerate(self.long):
            yield tokens, list(range(WORKERS)) if i == 0 else [i]


def workload() -> Workload:
    """The token ids of everything, without shared beginnings."""
    generator = np.random.default_rng(7)

    def draw(count: int, blocks: int) -> list[Tokens]:
        shape = (count, blocks * BLOCK_SIZE)
        return list(generator.integers(0, VOCABULARY, shape, dtype=np.uint32))

    short, long, passing = draw(SHORTS, SHORT), draw(LONGS, LONG), draw(PASSING, SHORT)
    strange = {blocks: draw(1, blocks)[0] for blocks in (SHORT, LONG)}
    return Workload(short, long, passing, strange)
