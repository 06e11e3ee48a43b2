"""StepBatch: a step's tokens, laid out for the model."""

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
    row: int  # row in the block tables
    first: int  # index of its first token in the step
    count: int  # tokens, at least 2
    past: int  # preceding cache entries


@dataclass(slots=True)
class StepBatch:
    """The tokens of one step: single-token entries first, then chunks."""

    tokens: Tensor  # ids, shape (tokens,), int32, on the device
    # shape (3, tokens): rotary position; slot of the token's cache entry in its sequence (it
    # attends to slots up to this one); batch row.
    locations: Ints
    singles: int  # single-token entries; they come first
    chunks: list[PromptChunk]
    last: NDArray[np.int64]  # last token of each plan entry, shape (entries,)
    entries: NDArray[np.int64]  # plan entries that sample, shape (samples,)

    @property
    def size(self) -> int:
        """Tokens in the step."""
        return len(self.rows)

    @property
    def positions(self) -> Ints:
        """Rotary position of each token, shape (tokens,)."""
        return self.locations[POSITION, :]

    @property
    def slots(self) -> Ints:
        """Cache slot of each token within its sequence, shape (tokens,)."""
        return self.locations[SLOT, :]

    @property
    def rows(self) -> Ints:
        """Batch row of each token, shape (tokens,)."""
        return self.locations[ROW, :]

    def advance(self, tokens: Tensor) -> None:
        """Advance to the next step of a repeated plan, given `tokens` just sampled, (entries,)."""
        self.tokens = tokens
        self.locations[:ROW] += 1


def make_batch(plan: Plan, tokens: list[Ints], device: torch.device) -> StepBatch:
    """Lay out the first step of a nonempty plan; `tokens` holds ids by plan entry."""
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
