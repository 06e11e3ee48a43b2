"""What decides which entries stay: published scores, and the learned return. Higher stays.

Each is a function of a `Probe` and returns shape (L, B, H, length).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pigou.runtime.token_eviction.predictor import PaperModel, ReturnModel
from returns.probe import Probe

SINKS, RECENT = 4, 32
AHEAD = 512  # positions that expected attention averages over

Policy = Callable[[Probe], Tensor]


def streaming(probe: Probe) -> Tensor:
    """The newest stay (StreamingLLM; with the sinks that all have, FIFO is the same)."""
    return torch.arange(float(probe.length)).expand(probe.alive[..., : probe.length].shape)


def h2o(probe: Probe) -> Tensor:
    """Attention received so far (H2O)."""
    return probe.masses[..., : probe.length, 0]


def snapkv(probe: Probe) -> Tensor:
    """Attention received from the last 32 queries, smoothed over five neighbours (SnapKV)."""
    window = probe.window[..., : probe.length]
    flat = window.flatten(0, 1)
    return F.avg_pool1d(flat, 5, stride=1, padding=2).view(window.shape)


def tova(probe: Probe) -> Tensor:
    """Attention received from the last query, the same for all heads of a layer (TOVA)."""
    last = probe.last[..., : probe.length]
    return last.mean(2, keepdim=True).expand_as(last)


def knorm(probe: Probe) -> Tensor:
    """Short keys stay (Devoto et al. 2024)."""
    lengths: Tensor = probe.keys[..., : probe.length, :].norm(dim=-1)
    return -lengths


def keydiff(probe: Probe) -> Tensor:
    """Keys unlike the mean key stay (KeyDiff)."""
    keys = F.normalize(probe.turned[..., : probe.length, :], dim=-1)
    alive = probe.alive[..., : probe.length, None]
    anchor = (keys * alive).sum(-2, keepdim=True)
    return -F.cosine_similarity(keys, anchor, dim=-1)


def expected(probe: Probe) -> Tensor:
    """Attention expected of normal queries, times the value's norm (Expected Attention)."""
    length, width = probe.length, probe.config.head_dim
    queries = probe.queries[..., SINKS:length, :]
    mean = queries.mean(-2)
    centred = queries - mean.unsqueeze(-2)
    spread = centred.transpose(-1, -2) @ centred / centred.shape[-2]
    turn = _mean_turn(probe, length)
    mean, spread = mean @ turn.T, turn @ spread @ turn.T
    keys = probe.turned[..., :length, :].unsqueeze(3)
    scores = (keys @ mean.unsqueeze(-1)).squeeze(-1) / width**0.5
    scores = scores + ((keys @ spread) * keys).sum(-1) / (2 * width)
    scores = scores.masked_fill(~probe.alive[..., None, :length], float("-inf")).softmax(-1)
    lengths: Tensor = probe.values[..., :length, :].norm(dim=-1)
    weighed: Tensor = scores.mean(3) * lengths
    return weighed


def _mean_turn(probe: Probe, start: int) -> Tensor:
    """Mean rotation over the positions to come, shape (D, D)."""
    rope = probe.config.rope
    assert rope is not None
    frequencies = torch.from_numpy(rope.frequencies)
    angles = torch.arange(start, start + AHEAD)[:, None] * frequencies
    cos, sin = angles.cos().mean(0).diag(), angles.sin().mean(0).diag()
    return torch.cat((torch.cat((cos, -sin), 1), torch.cat((sin, cos), 1)))


@dataclass(frozen=True)
class Drawn:
    """Any may stay."""

    seed: int = 0

    def __call__(self, probe: Probe) -> Tensor:
        """Scores without meaning."""
        generator = torch.Generator().manual_seed(self.seed + probe.length)
        return torch.rand(probe.alive[..., : probe.length].shape, generator=generator)


@dataclass(frozen=True)
class Learned:
    """The learned return, at its power mean, exp(mean + order sigma^2 / 2)."""

    model: ReturnModel
    order: float = 0.0

    def __call__(self, probe: Probe) -> Tensor:
        """The logarithm of the return."""
        mean, sigma = judge(self.model, probe)
        return mean + self.order / 2 * sigma.square()


@dataclass(frozen=True)
class Paper:
    """Token-PD's R - lambda sigma^2, of whole tokens."""

    model: PaperModel
    weight: float = 0.0

    def __call__(self, probe: Probe) -> Tensor:
        """The same for all layers and heads."""
        logits = torch.cat(probe.logits, dim=1)
        mean, variance = self.model.birth(logits.flatten(0, 1))
        worth = (mean - self.weight * variance).view(1, probe.batch, 1, -1)
        return worth.expand(probe.alive[..., : probe.length].shape)


def judge(model: ReturnModel, probe: Probe) -> tuple[Tensor, Tensor]:
    """Mean and sigma of every slot, each of shape (L, B, H, length)."""
    length = probe.length

    def rows(x: Tensor) -> Tensor:
        """(L, B, H, N, ...) as (L, H, B * length, ...)."""
        return x[:, :, :, :length].transpose(1, 2).flatten(2, 3)

    content = model.birth(rows(probe.keys), rows(probe.values))
    age = (length - torch.arange(float(length))).repeat(probe.batch)
    shape = content.shape[:3]
    both = model.value(content, rows(probe.masses), age.expand(shape))
    layers, heads = shape[:2]
    mean, sigma = (x.view(layers, heads, probe.batch, length).transpose(1, 2) for x in both)
    return mean, sigma


def baselines() -> dict[str, Policy]:
    """The published ones, by name."""
    plain = (streaming, h2o, snapkv, tova, knorm, keydiff, expected)
    return {"random": Drawn(), **{p.__name__: p for p in plain}}


def keep(probe: Probe, score: Tensor, budget: int) -> Tensor:
    """Slots that stay: `budget` in each layer and head, sinks and the recent window among them.

    Returns:
        Shape of `score`, bool. All that are alive, where they are no more than `budget`.
    """
    alive = probe.alive[..., : probe.length]
    forced = score.masked_fill(~alive, float("-inf"))
    forced[..., :SINKS] = float("inf")
    forced[..., max(probe.length - RECENT, 0) :] = float("inf")
    if budget >= probe.length:
        return alive.clone()
    best = forced.topk(budget, dim=-1).indices
    return torch.zeros_like(alive).scatter_(-1, best, True) & alive
