"""Choosing one token for each of a batch of sequences."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from pigou.runtime.draw import choose, uniform
from pigou.runtime.errors import GrammarError
from pigou.runtime.logprobs import report
from pigou.runtime.ops import Ops
from pigou.runtime.outputs import TokenLogprobs
from pigou.runtime.penalties import adjust, adjusts
from pigou.runtime.sequence import Sequence
from pigou.runtime.truncation import cut_min_p, cut_top_k, cut_top_p
from pigou.runtime.upload import upload
from pigou.sampling import SamplingParams

#: Logits beyond this are as good as certain.
_MOST = 1e30


class Sampler:
    """Chooses tokens for a fixed list of sequences, step after step.

    What depends on the parameters alone is worked out once. Plain greedy rows cost one argmax.
    A row's token depends on its own logits, parameters, tokens and position, and on no other row.
    """

    def __init__(self, sequences: list[Sequence], ops: Ops, device: torch.device) -> None:
        """Prepare for these sequences, in the order of the logits' rows."""
        self._sequences = sequences
        self._ops = ops
        params = [sequence.params for sequence in sequences]
        self._adjusted = [i for i, p in enumerate(params) if adjusts(p)]
        self._reported = [i for i, p in enumerate(params) if p.logprobs is not None]
        self._random = [i for i, p in enumerate(params) if p.temperature > 0]
        self._device = device
        if self._random:
            self._prepare([params[i] for i in self._random])

    def __call__(self, logits: Tensor) -> tuple[Tensor, dict[int, TokenLogprobs]]:
        """Choose a token for each row.

        Args:
            logits: shape (n, vocab); may be overwritten.

        Returns:
            Tokens, shape (n,), int64, and reports by row for the sequences that ask for them. A
            sequence whose grammar cannot go on has a `failure`, and its token means nothing.
        """
        raw = logits[self._index(self._reported)] if self._reported else None
        if self._adjusted:
            logits = logits.float()
        for row in self._adjusted:
            try:
                adjust(logits[row], self._sequences[row])
            except GrammarError as error:
                self._sequences[row].failure = str(error)
        if len(self._random) == len(self._sequences):
            tokens = self._draw(logits)
        else:
            tokens = self._ops.argmax(logits)
            if self._random:
                tokens[self._rows] = self._draw(logits[self._rows])
        return tokens, {} if raw is None else self._report(raw, tokens)

    def _prepare(self, params: list[SamplingParams]) -> None:
        def column(get: Callable[[SamplingParams], float], dtype: torch.dtype) -> Tensor:
            return upload(np.array([get(p) for p in params]), self._device).to(dtype)

        self._rows = self._index(self._random)
        self._largest_k = max(1, *(p.top_k for p in params))
        self._scale = column(lambda p: 1.0 / p.temperature, torch.float32).unsqueeze(-1)
        self._min_p = column(lambda p: p.min_p, torch.float32)
        self._top_k = column(lambda p: p.top_k, torch.int64)
        self._top_p = column(lambda p: p.top_p, torch.float64)
        self._cuts = (
            any(p.min_p > 0 for p in params),
            any(p.top_k > 0 for p in params),
            any(p.top_p < 1 for p in params),
        )

    def _draw(self, logits: Tensor) -> Tensor:
        """Draw from the rows that are not greedy; `logits` has these rows alone."""
        # Extreme penalties overflow; two infinities would make the softmax NaN.
        logits = (logits.float() * self._scale).clamp_(max=_MOST)
        min_p, top_k, top_p = self._cuts
        if min_p:
            cut_min_p(logits, self._min_p)
        if top_k:
            cut_top_k(logits, self._top_k, self._largest_k)
        if top_p:
            cut_top_p(logits, self._top_p)
        sequences = [self._sequences[i] for i in self._random]
        uniforms = [uniform(s.params.seed, s.length) for s in sequences]
        return choose(
            logits.softmax(-1), upload(np.array(uniforms, dtype=np.float64), self._device)
        )

    def _index(self, rows: list[int]) -> Tensor:
        return upload(np.array(rows, dtype=np.int64), self._device)

    def _report(self, raw: Tensor, tokens: Tensor) -> dict[int, TokenLogprobs]:
        tops = [self._sequences[i].params.logprobs or 0 for i in self._reported]
        reports = report(raw, tokens[self._index(self._reported)], tops)
        return dict(zip(self._reported, reports, strict=True))
