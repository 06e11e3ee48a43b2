"""What an entry is worth at a cut: how much nearer it brings the output, when others are gone.

Entries that are given up together do not add up like single ones: where they are alike, their
changes point the same way. So an entry is judged here by the squared error of the layer's output,
behind the output product, without it less the error with it, the rest being cut as a policy cuts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pigou.runtime.token_eviction.predictor import ReturnModel
from returns.change import ROOM

SINKS, RECENT = 4, 32  # protected anyway
SHARES = (0.5, 0.25, 0.25, 0.125)  # shares of entries that a cut leaves, equally likely
OWN = 0.1  # minimum worth of an entry, as a share of its own squared change
STRIDE = 2  # every second query to come is looked at


def cut(model: ReturnModel, content: Tensor, masses: Tensor, share: float) -> Tensor:
    """Entries that a policy keeps of the first n, at its expected return.

    Args:
        content: of the entries, shape (L, H, n, CONTENT).
        masses: received by now, shape (L, H, n, scales).
        share: of the entries that are kept; sinks and recent ones always are.

    Returns:
        Shape (L, H, n), bool.
    """
    count = content.shape[2]
    age = (count - torch.arange(float(count))).expand(content.shape[:3])
    mean, sigma = model.value(content, masses, age)
    score = mean + sigma
    score[..., :SINKS] = score[..., -RECENT:] = float("inf")
    best = score.topk(min(max(int(share * count), SINKS + RECENT), count), dim=-1).indices
    return torch.zeros(score.shape, dtype=torch.bool).scatter_(-1, best, True)


def gains(
    probs: Tensor, outputs: Tensor, values: Tensor, kept: Tensor, chosen: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """How much less the squared error is with an entry than without it.

    The change by one entry is taken for each query head by itself; the error is that of the layer.

    Args:
        probs: attention of the full cache, shape (H, G, queries, entries).
        outputs: of the full cache, shape (H, G, queries, D).
        values: shape (H, entries, D).
        kept: of the first entries, shape (H, n), bool; later ones are there.
        chosen: entries that are judged, shape (e,), below n.
        weight: of the output product, shape (hidden, H * G * D).

    Returns:
        That, and the entry's own squared change, each of shape (H, queries, e).
    """
    heads, group, queries, width = outputs.shape
    cached = probs.clone()
    cached[..., : kept.shape[1]] *= kept[:, None, None]
    mass = cached.sum(-1, keepdim=True)
    out = cached @ values[:, None] / mass
    error = (out - outputs).permute(2, 0, 1, 3).reshape(queries, -1) @ weight.T
    pull = (error @ weight).view(queries, heads, group, width).permute(1, 2, 0, 3)
    own, p = values[:, None, chosen], probs[..., chosen]
    there = kept[:, chosen][:, None, None]
    turn = torch.where(there, p / (mass - p).clamp_min(ROOM), p / (mass + p))
    along = (pull * out).sum(-1, keepdim=True) - pull @ own.mT
    parts = weight.view(-1, heads, group, width)
    gram = torch.einsum("nhgd,nhge->hgde", parts, parts)
    weighed = out @ gram
    square = ((own @ gram) * own).sum(-1).unsqueeze(2) + (weighed * out).sum(-1, keepdim=True)
    square = turn.square() * (square - 2 * weighed @ own.mT).clamp_min(0)
    gain = 2 * turn * along + torch.where(there, square, -square)
    return gain.sum(1), square.sum(1)


def worth(gain: Tensor, square: Tensor, horizon: float) -> Tensor:
    """Return to come at a cut: what the entry brings where it helps, discounted.

    Args:
        gain: from `gains`, of every `STRIDE`-th query to come, shape (H, queries, e).
        square: from `gains`.
        horizon: in tokens.

    Returns:
        Shape (H, e), above 0 where the entry is ever attended to.
    """
    fade = torch.exp(-torch.arange(gain.shape[1]) * STRIDE / horizon)
    fade = fade / fade.sum() * horizon
    return (fade[:, None] * (gain.clamp_min(0) + OWN * square)).sum(1)
