"""What dropping an entry changes: the target of training.

Without entry j, query i's output changes by p/(1-p) (o - v_j) in closed form, because the other
probabilities are scaled up by 1/(1-p) (DropKV, openreview MqfNzH3TVH). Measured here behind the
output product, and discounted over the queries to come.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROOM = 1e-4  # least 1 - p: beyond, float32 has no digits left of o - v


def output_grams(weight: Tensor, kv_heads: int, group: int) -> Tensor:
    """W_h^T W_h of each query head's part of the output product, (kv_heads, group, D, D)."""
    hidden, width = weight.shape
    parts = weight.view(hidden, kv_heads, group, width // (kv_heads * group))
    return torch.einsum("nhgd,nhge->hgde", parts, parts)


def drop_changes(probs: Tensor, outputs: Tensor, values: Tensor, grams: Tensor) -> Tensor:
    """Norm of the change behind the output product for each query and dropped entry.

    Args:
        probs: attention, shape (B, H, G, queries, entries).
        outputs: of the heads, shape (B, H, G, queries, D).
        values: shape (B, H, entries, D).
        grams: from `output_grams`.

    Returns:
        Summed over the query heads of a KV head, shape (B, H, queries, entries): an upper bound
        of the norm of the sum.
    """
    total = torch.zeros(probs.shape[0], probs.shape[1], *probs.shape[3:])
    for head in range(probs.shape[2]):
        gram = grams[:, head].unsqueeze(0)
        out, p = outputs[:, :, head], probs[:, :, head]
        weighed = out @ gram
        own = ((values @ gram) * values).sum(-1).unsqueeze(2)
        theirs = (weighed * out).sum(-1).unsqueeze(3)
        square = own + theirs - 2 * weighed @ values.transpose(-1, -2)
        total += p / (1 - p).clamp_min(ROOM) * square.clamp_min(0).sqrt()
    return total


def discounted(changes: Tensor, times: Tensor, horizon: float) -> Tensor:
    """Return to come, at several times, discounted by exp(-1/horizon) a query.

    The discounted mean over the queries that are known, times `horizon`, so that the sequence's
    end does not look like worthlessness.

    Args:
        changes: shape (..., queries, entries).
        times: first future query of each time, shape (n,).
        horizon: in tokens.

    Returns:
        Shape (..., n, entries).
    """
    ahead = torch.arange(changes.shape[-2]) - times[:, None]
    weights = torch.where(ahead >= 0, torch.exp(-ahead / horizon), torch.zeros(()))
    weights = weights / weights.sum(-1, keepdim=True) * horizon
    return weights @ changes
