"""What changes a sequence's logits before a token is chosen: bias, penalties, bans, grammar."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pigou.runtime.sequence import TokenSequence
from pigou.runtime.tensor_io import upload
from pigou.sampling import SamplingParams

_OUT = float("-inf")


def adjusts(params: SamplingParams) -> bool:
    """Whether these parameters can change logits at all."""
    return bool(
        params.logit_bias
        or params.min_tokens
        or params.grammar is not None
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
    )


def adjust(logits: Tensor, sequence: TokenSequence) -> None:
    """Apply a sequence's parameters to its logits, shape (vocab,), in place.

    In order: repetition penalty, frequency and presence penalty, bias, the ban on end tokens
    before `min_tokens`, the grammar. Where the last two leave nothing, end tokens are allowed.

    Raises:
        GrammarError: the grammar cannot go on.
    """
    params = sequence.params
    if params.repetition_penalty != 1.0:
        _penalize_repetition(logits, sequence)
    if params.frequency_penalty or params.presence_penalty:
        seen = sequence.output_counts
        cost = seen.counts * params.frequency_penalty + params.presence_penalty
        logits[_on(logits, seen.ids)] -= upload(cost, logits.device).to(logits.dtype)
    if params.logit_bias:
        tokens, bias = sequence.bias
        logits[_on(logits, tokens)] += upload(bias, logits.device).to(logits.dtype)
    _forbid(logits, sequence)


def _penalize_repetition(logits: Tensor, sequence: TokenSequence) -> None:
    """Divide positive and multiply negative logits of tokens seen (arXiv 1909.05858, eq. 2)."""
    penalty = sequence.params.repetition_penalty
    seen = _on(logits, sequence.all_counts.ids)
    values = logits[seen]
    logits[seen] = torch.where(values > 0, values / penalty, values * penalty)


def _forbid(logits: Tensor, sequence: TokenSequence) -> None:
    banned = sequence.banned
    if sequence.grammar is None:
        if len(banned):
            logits[_on(logits, banned)] = _OUT
        return
    allowed = sequence.grammar.allowed()
    if len(banned):
        unbanned = allowed.copy()
        unbanned[banned] = False
        allowed = unbanned if unbanned.any() else allowed
    logits.masked_fill_(~upload(allowed, logits.device), _OUT)


def _on(logits: Tensor, tokens: NDArray[np.integer]) -> Tensor:
    return upload(tokens.astype(np.int64), logits.device)
