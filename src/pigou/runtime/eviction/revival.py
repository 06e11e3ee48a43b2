"""Tokens that were given up are computed again (Token-PD, Eq. 2 and section 5)."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items

import numpy as np
import torch
from torch import Tensor

from pigou.engine import plan as plans
from pigou.request import Ints
from pigou.runtime.attention import PagedAttention, Past
from pigou.runtime.batch import Batch, Chunk
from pigou.runtime.decoder import Decoder
from pigou.runtime.eviction.evictor import Evictor
from pigou.runtime.kv_cache import KVCache


class _EarlierOnly(PagedAttention):
    """Attends by position instead of by slot: to entries of earlier tokens, and oneself."""

    def take(self, batch: Batch, tables: Ints, kept: list[Ints]) -> None:
        """Take up tokens that come back; `kept` has the positions of all entries, by chunk."""
        self.tables = tables
        self._kept = iter(kept)
        self.begin(batch)

    def _chunk_past(self, chunk: Chunk) -> Past:
        kept = next(self._kept)
        stop = chunk.first + chunk.count
        queries = self.batch.positions[chunk.first : stop, None]
        width = -(-len(kept) // self.block_size)
        mask = np.zeros((chunk.count, width * self.block_size), dtype=np.bool_)
        mask[:, : len(kept)] = kept <= queries
        seen = torch.from_numpy(mask).to(self.device)[None, None]
        return Past(self._index(self.tables[chunk.row, :width]), 1, seen)


class Revival:
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

    def __call__(self, revivals: Items[plans.Revival], tokens: Mapping[int, Ints]) -> None:
        """Revive tokens of some rows at once.

        Args:
            revivals: of a plan.
            tokens: ids by row.

        Raises:
            ValueError: more are to come back than were given up.
        """
        evictor = self._evictor
        longest = max(len(revival.blocks) for revival in revivals)
        tables = np.zeros((len(revivals), longest), dtype=np.int32)
        chunks: list[Chunk] = []
        places: list[Ints] = []
        kept: list[Ints] = []
        ids: list[Ints] = []
        first = 0
        for row, task in enumerate(revivals):
            tables[row, : len(task.blocks)] = task.blocks
            positions = evictor.revive(task.row, task.entries, task.count, task.blocks)
            entries = task.entries + task.count
            slots = np.arange(task.entries, entries, dtype=np.int32)
            places.append(np.stack((positions, slots, np.full_like(slots, row))))
            kept.append(evictor.positions(task.blocks, entries)[0, 0])
            ids.append(tokens[task.row][positions])
            chunks.append(Chunk(row, row, first, task.count, task.entries))
            first += task.count
        device = evictor.cache.data.device
        batch = Batch(
            tokens=torch.from_numpy(np.concatenate(ids)).to(device),
            places=np.concatenate(places, axis=1),
            singles=0,
            chunks=chunks,
            last=np.empty(0, dtype=np.int64),
            entries=np.empty(0, dtype=np.int64),
        )
        nobody = torch.empty(0, dtype=torch.int64, device=device)
        with torch.inference_mode():
            self._attention.take(batch, tables, kept)
            self._model.hidden(batch.tokens, self._attention, nobody)
