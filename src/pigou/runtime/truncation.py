"""Cutting the tail of a distribution: min-p, top-k, top-p."""

from __future__ import annotations

import torch
from torch import Tensor

#: Tokens among which the nucleus is sought first; sorting a whole vocabulary takes far longer.
_HEAD = 512
_OUT = float("-inf")


def cut_min_p(logits: Tensor, min_p: Tensor) -> None:
    """Drop, in place, tokens less than `min_p` times as probable as the most probable.

    Args:
        logits: shape (n, vocab), after temperature.
        min_p: shape (n,), in [0, 1]; 0 drops nothing (arXiv 2407.01082).
    """
    least = logits.amax(-1) + min_p.log()
    logits.masked_fill_(logits < least.unsqueeze(-1), _OUT)


def cut_top_k(logits: Tensor, top_k: Tensor, largest: int) -> None:
    """Keep, in place, the k most probable tokens, and those as probable as the k-th.

    Args:
        logits: shape (n, vocab).
        top_k: shape (n,), int64; 0 keeps all.
        largest: of `top_k`, at least 1; known to the host, so that it need not ask the device.
    """
    vocab = logits.shape[-1]
    ks = torch.where(top_k == 0, vocab, top_k.clamp(max=vocab))
    largest = min(largest, vocab)
    values = logits.topk(largest, dim=-1).values
    least = values.gather(-1, (ks.clamp(max=largest) - 1).unsqueeze(-1))
    least.masked_fill_((top_k == 0).unsqueeze(-1), _OUT)
    logits.masked_fill_(logits < least, _OUT)


def cut_top_p(logits: Tensor, top_p: Tensor) -> None:
    """Keep, in place, the smallest set of most probable tokens with at least this probability.

    Tokens as probable as the least of that set stay too (arXiv 1904.09751).

    Args:
        logits: shape (n, vocab), after temperature and the other cuts.
        top_p: shape (n,), in (0, 1]; 1 keeps all.
    """
    total = logits.logsumexp(-1, keepdim=True)
    values = logits.topk(min(_HEAD, logits.shape[-1]), dim=-1).values
    sums = (values - total).exp().cumsum(-1, dtype=torch.float64)
    short = bool(((sums[:, -1] < top_p) & (top_p < 1.0)).any())
    if short and values.shape[-1] < logits.shape[-1]:
        values = logits.sort(-1, descending=True).values
        sums = (values - total).exp().cumsum(-1, dtype=torch.float64)
    count = (sums < top_p.unsqueeze(-1)).sum(-1, keepdim=True)
    least = values.gather(-1, count.clamp(max=values.shape[-1] - 1))
    least.masked_fill_((top_p >= 1.0).unsqueeze(-1), _OUT)
    logits.masked_fill_(logits < least, _OUT)
