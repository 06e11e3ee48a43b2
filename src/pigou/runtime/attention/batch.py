"""A step's tokens, laid out for the model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pigou.engine.plan import Plan
from pigou.request import Ints
from pigou.runtime.tensor_io import upload

#: Rows of `StepBatch.locations`.
POSITION, SLOT, ROW = 0, 1, 2


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Several tokens of one sequence in a step."""

    entry: int
    row: int  # of the batch, whose block table it uses
    first: int  # its first token among the step's tokens
    count: int  # its tokens, at least 2
    past: int  # cache entries of the sequence before it


@dataclass(slots=True)
class StepBatch:
    """The tokens of one step: first the entries of a single token, then the chunks."""

    tokens: Tensor  # ids, shape (tokens,), int32, on the device
    # three rows, shape (3, tokens): rotary positions; slots, the index of each token's cache entry
    # within its sequence, up to and with which it attends; and rows of the batch.
    locations: Ints
    singles: int  # entries of a single token; theirs are the first tokens
    chunks: list[PromptChunk]
    last: NDArray[np.int64]  # last token of each plan entry, shape (entries,)
    entries: NDArray[np.int64]  # plan entries that sample, shape (samples,)

    @property
    def size(self) -> int:
        """Tokens of the step."""
        return len(self.rows)

    @property
    def positions(self) -> Ints:
        """Rotary position of each token, shape (tokens,)."""
        row: Ints = self.locations[POSITION]
        return row

    @property
    def slots(self) -> Ints:
        """Index of each token's cache entry within its sequence, shape (tokens,)."""
        row: Ints = self.locations[SLOT]
        return row

    @property
    def rows(self) -> Ints:
        """Row of the batch of each token, shape (tokens,)."""
        row: Ints = self.locations[ROW]
        return row

    def advance(self, tokens: Tensor) -> None:
        """Make this the next step of a repeated plan: every entry has one token, sampled just now.

        `tokens`: sampled, shape (entries,), in the plan's order.
        """
        self.tokens = tokens
        self.locations[:ROW] += 1


def make_batch(plan: Plan, tokens: list[Ints], device: torch.device) -> StepBatch:
    """Lay out the first step of a plan, which is not empty; `tokens` has ids by plan entry."""
    counts = plan.counts
    order = np.argsort(counts > 1, kind="stable")
    sizes = counts[order]
    stops = np.cumsum(sizes, dtype=np.int32)
    firsts = stops - sizes
    singles = int((counts == 1).sum())
    within = np.arange(int(stops[-1]), dtype=np.int32) - np.repeat(firsts, sizes)
    locations = np.stack((plan.starts[order], plan.kv_lens[order], plan.rows[order]))
    locations = np.repeat(locations, sizes, axis=1)
    locations[:ROW] += within
    last = np.empty(len(order), dtype=np.int64)
    last[order] = stops - 1
    ids = np.concatenate([tokens[entry] for entry in order])
    return StepBatch(
        tokens=upload(ids, device),
        locations=locations,
        singles=singles,
        chunks=[
            PromptChunk(
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
