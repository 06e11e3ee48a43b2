"""Log probabilities of tokens, as they are reported."""

from __future__ import annotations

import torch
from torch import Tensor

from pigou.runtime.outputs import TokenLogprobs


def report(logits: Tensor, tokens: Tensor, tops: list[int]) -> list[TokenLogprobs]:
    """Report tokens and the most probable ones beside them.

    Args:
        logits: raw, shape (n, vocab).
        tokens: chosen or given, shape (n,), int64.
        tops: how many of the most probable to report, by row.

    Returns:
        A report for each row.
    """
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(-1, tokens.unsqueeze(-1))
    ranks = (logprobs > chosen).sum(-1) + 1
    values, ids = logprobs.topk(min(max(tops), logits.shape[-1]), dim=-1)
    columns = zip(
        tokens.tolist(),
        chosen.squeeze(-1).tolist(),
        ranks.tolist(),
        ids.cpu().numpy(),
        values.cpu().numpy(),
        tops,
        strict=True,
    )
    return [
        TokenLogprobs(token, logprob, rank, top[:k].copy(), top_logprobs[:k].copy())
        for token, logprob, rank, top, top_logprobs, k in columns
    ]


def as_tokens(tokens: list[int], device: torch.device) -> Tensor:
    """Return token ids as int64 on a device."""
    return torch.tensor(tokens, dtype=torch.int64, device=device)
