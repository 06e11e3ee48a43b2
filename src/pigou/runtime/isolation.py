"""Exceptions that one sequence causes: they fail that sequence, and no other of its batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pigou.runtime.containment import described, is_contained
from pigou.runtime.ops import Ops
from pigou.runtime.outputs import TokenLogprobs
from pigou.runtime.sampling import Sampler
from pigou.runtime.sequence import Sequence

MakeSampler = Callable[[list[Sequence], Ops, torch.device], Sampler]


class IsolatedSampler:
    """Chooses tokens as `Sampler` does; what fails in one row fails that row alone."""

    def __init__(
        self, make: MakeSampler, sequences: list[Sequence], ops: Ops, device: torch.device
    ) -> None:
        """Prepare for these sequences, in the order of the logits' rows."""
        self._make, self._ops, self._device = make, ops, device
        self._sequences = sequences
        self._together: Sampler | None = None
        try:
            self._together = make(sequences, ops, device)
        except BaseException as error:
            if not is_contained(error):
                raise

    def __call__(
        self, logits: Callable[[Tensor], Tensor], hidden: Tensor
    ) -> tuple[Tensor, dict[int, TokenLogprobs], dict[int, str]]:
        """Choose a token for each row.

        Args:
            logits: of hidden states, shape (n, vocab); called again after a failure, because a
                sampler may overwrite them.
            hidden: states of the last tokens, shape (n, hidden).

        Returns:
            Tokens, shape (n,), int64, 0 where it failed; reports by row; failures by row.
        """
        if self._together is not None:
            try:
                return *self._together(logits(hidden)), {}
            except BaseException as error:
                if not is_contained(error):
                    raise
        return self._one_by_one(logits(hidden))

    def _one_by_one(
        self, logits: Tensor
    ) -> tuple[Tensor, dict[int, TokenLogprobs], dict[int, str]]:
        tokens = torch.zeros(len(self._sequences), dtype=torch.int64, device=self._device)
        reports: dict[int, TokenLogprobs] = {}
        failed: dict[int, str] = {}
        for row, sequence in enumerate(self._sequences):
            try:
                sampler = self._make([sequence], self._ops, self._device)
                chosen, report = sampler(logits[row : row + 1].clone())
            except BaseException as error:
                if not is_contained(error):
                    raise
                failed[row] = described(error)
            else:
                tokens[row] = chosen[0]
                if 0 in report:
                    reports[row] = report[0]
        return tokens, reports, failed
