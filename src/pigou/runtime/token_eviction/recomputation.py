"""Recomputation of evicted tokens (Token-PD, Eq. 2 and section 5)."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pigou.engine import plan as plans
from pigou.request import Ints
from pigou.runtime.attention import PagedAttention, Past
from pigou.runtime.batch import PromptChunk, StepBatch
from pigou.runtime.decoder import Decoder
from pigou.runtime.kv_cache import KVCache
from pigou.runtime.token_eviction.policy import Floats

if TYPE_CHECKING:
    from pigou.runtime.token_eviction.evictor import Evictor


class _EarlierOnly(PagedAttention):
    """Attends by position instead of by slot: to entries of earlier tokens, and oneself."""

    def take(self, batch: StepBatch, tables: Ints, positions: list[Ints]) -> None:
        """Take up tokens that come back; `positions` are those of all entries, by chunk."""
        self.tables = tables
        self._entry_positions = iter(positions)
        self.begin(batch)

    def _chunk_past(self, chunk: PromptChunk) -> Past:
        positions = next(self._entry_positions)
        stop = chunk.first + chunk.count
        queries = self.batch.positions[chunk.first : stop, None]
        width = -(-len(positions) // self.block_size)
        mask = np.zeros((chunk.count, width * self.block_size), dtype=np.bool_)
        mask[:, : len(positions)] = positions <= queries
        seen = torch.from_numpy(mask).to(self.device)[None, None]
        return Past(self._index(self.tables[chunk.row, :width]), 1, seen)


class TokenRecomputation:
    """Computes tokens at their own positions, and stores them behind a row's entries.

    They see the entries that are there now. Where others had gone when they were first computed, or
    have gone since, what comes back is near what they were, not equal to it.
    """

    def __init__(self, model: Decoder, cache: KVCache, evictor: Evictor, turns: Tensor) -> None:
        """Bind a model, its cache, who keeps track of entries, and the rotary table."""
        self._model = model
        self._evictor = evictor
        none = np.zeros((1, 1), dtype=np.int32)
        self._attention = _EarlierOnly(model.config, cache, none, 1)
        self._attention.turns = turns

    def __call__(
        self, recomputations: Items[plans.Recomputation], tokens: Mapping[int, Ints]
    ) -> None:
        """Compute tokens of some rows again, at once.

        Args:
            tokens: ids by row.

        Raises:
            ValueError: more are to come back than were given up.
        """
        evictor = self._evictor
        max_blocks = max(len(recomputation.blocks) for recomputation in recomputations)
        tables = np.zeros((len(recomputations), max_blocks), dtype=np.int32)
        chunks: list[PromptChunk] = []
        locations: list[Ints] = []
        entry_positions: list[Ints] = []
        ids: list[Ints] = []
        first = 0
        for row, task in enumerate(recomputations):
            tables[row, : len(task.blocks)] = task.blocks
            positions = evictor.add_recomputed(task.row, task.entries, task.count, task.blocks)
            entries = task.entries + task.count
            slots = np.arange(task.entries, entries, dtype=np.int32)
            locations.append(np.stack((positions, slots, np.full_like(slots, row))))
            entry_positions.append(evictor.positions(task.blocks, entries)[0, 0])
            ids.append(tokens[task.row][positions])
            chunks.append(PromptChunk(row, row, first, task.count, task.entries))
            first += task.count
        device = evictor.cache.data.device
        batch = StepBatch(
            tokens=torch.from_numpy(np.concatenate(ids)).to(device),
            locations=np.concatenate(locations, axis=1),
            singles=0,
            chunks=chunks,
            last=np.empty(0, dtype=np.int64),
            entries=np.empty(0, dtype=np.int64),
        )
        nobody = torch.empty(0, dtype=torch.int64, device=device)
        with torch.inference_mode():
            self._attention.take(batch, tables, entry_positions)
            self._model.hidden(batch.tokens, self._attention, nobody)


def _no_returns() -> NDArray[np.float64]:
    return np.empty(0)


@dataclass(slots=True)
class Dropped:
    """Whole tokens that a request gave up, those of the highest return first."""

    # shape (n,), int32.
    positions: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    # that they were given up at, shape (n,).
    returns: NDArray[np.float64] = field(default_factory=_no_returns)
    # their side data, of one head, shape (1 + fields, n).
    data: Floats = field(default_factory=lambda: np.empty((0, 0), dtype=np.float32))

    def add(self, positions: Ints, returns: NDArray[np.floating], data: Floats) -> None:
        """Remember tokens."""
        old = self.data if len(self.positions) else data[:, :0]
        everyone = np.concatenate((self.returns, returns.astype(np.float64)))
        order = np.argsort(-everyone, kind="stable")
        self.positions = np.concatenate((self.positions, positions))[order]
        self.returns = everyone[order]
        self.data = np.concatenate((old, data), axis=1)[:, order]

    def take(self, count: int) -> tuple[Ints, Floats]:
        """Forget the `count` tokens of the highest return, and give their positions and data.

        Both are in the order of positions.

        Raises:
            ValueError: there are fewer.
        """
        if count > len(self.positions):
            known = len(self.positions)
            raise ValueError(f"{count} tokens are to come back; {known} were given up")
        order = np.argsort(self.positions[:count])
        taken = self.positions[:count][order], self.data[:, :count][:, order]
        self.positions, self.returns = self.positions[count:], self.returns[count:]
        self.data = self.data[:, count:]
        return taken

    def regained_returns(self, size: int, penalty: float) -> NDArray[np.float64]:
        """Return what comes back with each further whole block of tokens, shape (blocks,).

        Each token's penalty is taken off.
        """
        blocks = len(self.returns) // size
        sums: NDArray[np.float64] = self.returns[: blocks * size].reshape(blocks, size).sum(1)
        return sums - penalty * size

    def cut(self, length: int) -> None:
        """Forget tokens from position `length` on."""
        retained = self.positions < length
        self.positions, self.returns = self.positions[retained], self.returns[retained]
        self.data = self.data[:, retained]
