"""CUDA graphs: a decode step replayed as one launch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pigou.runtime.attention.cuda_attention import CUDAAttention
from pigou.runtime.attention.paged_attention import PagedAttention
from pigou.runtime.models.decoder import DecoderModel

#: Eager steps before a capture, which compile kernels and fill allocators.
_WARM_UPS = 2


def graph_sizes(max_seqs: int) -> list[int]:
    """Return the captured batch sizes: 1, 2, 4, 8, then every 16, and `max_seqs`."""
    sizes = [1, 2, 4, 8, *range(16, max_seqs, 16)]
    return [size for size in sizes if size < max_seqs] + [max_seqs]


class _Capture(NamedTuple):
    graph: Any
    tokens: Tensor  # shape (size,)
    hidden: Tensor  # shape (size, hidden)


class DecodeGraphs:
    """A decoder whose decode steps replay graphs; other steps run as they are.

    A batch is padded to the next captured size. Padding writes no cache entry and attends to none.
    """

    def __init__(
        self, model: DecoderModel, attention: CUDAAttention, max_seqs: int, cuda: Any = torch.cuda
    ) -> None:
        self.config, self.ops, self.loads = model.config, model.ops, model.loads
        self._model, self._attention, self._cuda = model, attention, cuda
        self.sizes = graph_sizes(max_seqs)
        self._captures: dict[int, _Capture] = {}
        self._pool: Any = None

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits (n, vocab) of hidden states (n, hidden)."""
        return self._model.logits(hidden)

    def rotary_table(self, attention: PagedAttention) -> Tensor:
        """Return cosines, then sines, of keys by position."""
        return self._model.rotary_table(attention)

    def capture(self) -> None:
        """Capture all sizes, the largest first, so that the others fit in its memory."""
        device = self._attention.device
        for size in reversed(self.sizes):
            tokens = torch.zeros(size, dtype=torch.int32, device=device)
            self._attention.begin_padding(size)
            for _ in range(_WARM_UPS):
                self._model.hidden(tokens, self._attention, None)
            self._cuda.synchronize(device)
            graph = self._cuda.CUDAGraph()
            with self._cuda.graph(graph, pool=self._pool):
                hidden = self._model.hidden(tokens, self._attention, None)
            self._pool = self._pool or graph.pool()
            self._captures[size] = _Capture(graph, tokens, hidden)

    def hidden(self, tokens: Tensor, attention: PagedAttention, wanted: Tensor | None) -> Tensor:
        """Return normalized hidden states of tokens (tokens,), only the `wanted` (n,) or all."""
        batch = attention.batch
        size = next((size for size in self.sizes if size >= batch.size), 0)
        if batch.singles != batch.size or wanted is not None or not self._captures or not size:
            return self._model.hidden(tokens, attention, wanted)
        if not self._attention.enter_graph(size):
            return self._model.hidden(tokens, attention, wanted)
        capture = self._captures[size]
        if self.loads is not None:
            self.loads.begin_step()
        capture.tokens[: batch.size].copy_(tokens)
        capture.graph.replay()
        return capture.hidden[: batch.size]
