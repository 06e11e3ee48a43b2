"""A step's tokens, laid out for the model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pigou.engine.plan import Plan
from pigou.request import Ints


@dataclass(frozen=True, slots=True)
class Chunk:
    """Several tokens of one sequence in a step.

    Attributes:
        entry: of the plan.
        row: of the batch, whose block table it uses.
        first: its first token among the step's tokens.
        count: its tokens, at least 2.
        past: cache entries of the sequence before it.
    """

    entry: int
    row: int
    first: int
    count: int
    past: int


@dataclass(slots=True)
class Batch:
    """The tokens of one step: first the entries of a single token, then the chunks.

    Attributes:
        tokens: ids, shape (tokens,), int32, on the device.
        positions: rotary positions, shape (tokens,).
        slots: index of each token's cache entry within its sequence, shape (tokens,); it attends
            to the entries up to and with its own.
        rows: row of each token, shape (tokens,).
        singles: entries of a single token; theirs are the first tokens.
        chunks: the others.
        last: last token of each plan entry, shape (entries,).
        entries: plan entries that sample, shape (samples,).
    """

    tokens: Tensor
    positions: Ints
    slots: Ints
    rows: Ints
    singles: int
    chunks: list[Chunk]
    last: NDArray[np.int64]
    entries: NDArray[np.int64]

    @property
    def size(self) -> int:
        """Tokens of the step."""
        return len(self.rows)

    def advance(self, tokens: Tensor) -> None:
        """Make this the next step of a repeated plan: every entry has one token, sampled just now.

        Args:
            tokens: sampled, shape (entries,), in the plan's order.
        """
        self.tokens = tokens
        self.positions += 1
        self.slots += 1


def make_batch(plan: Plan, tokens: list[Ints], device: torch.device) -> Batch:
    """Lay out the first step of a plan.

    Args:
        plan: not empty.
        tokens: ids to compute, by plan entry, each of shape (counts[i],).
        device: of the model.

    Returns:
        The batch; its arrays are its own.
    """
    counts = plan.counts
    order = np.argsort(counts > 1, kind="stable")
    sizes = counts[order]
    ends = np.cumsum(sizes, dtype=np.int32)
    firsts = ends - sizes
    singles = int((counts == 1).sum())
    within = np.arange(int(ends[-1]), dtype=np.int32) - np.repeat(firsts, sizes)
    last = np.empty(len(order), dtype=np.int64)
    last[order] = ends - 1
    ids = np.concatenate([tokens[entry] for entry in order])
    return Batch(
        tokens=torch.from_numpy(ids).to(device),
        positions=np.repeat(plan.starts[order], sizes) + within,
        slots=np.repeat(plan.kv_lens[order], sizes) + within,
        rows=np.repeat(plan.rows[order], sizes),
        singles=singles,
        chunks=[
            Chunk(
                int(order[at]),
                int(plan.rows[order[at]]),
                int(firsts[at]),
                int(sizes[at]),
                int(plan.kv_lens[order[at]]),
            )
            for at in range(singles, len(order))
        ],
        last=last,
        entries=np.flatnonzero(plan.samples),
    )
