"""Token-PD's predictor: its examples, and fitting it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pigou.runtime.token_eviction.predictor import PaperModel
from returns.probe import Probe

HIDDEN = 256
LATEST = 64  # least queries that come after a token that is learned from


@dataclass(frozen=True)
class Births:
    """Tokens at their birth."""

    logits: Tensor  # logits of the step that stored the token, shape (n, vocab), float16
    target: Tensor  # R: mean attention that came later, over queries, layers and heads, shape (n,)

    @classmethod
    def of(cls, probe: Probe, logits: Tensor, chosen: Tensor) -> Births:
        """Tokens `chosen` of a single sequence that was read to its end.

        Args:
            probe: after the sequence.
            logits: of all its tokens, shape (T, vocab).
            chosen: indices, below T - `LATEST`.
        """
        received = (probe.masses[..., 0] - probe.own)[:, 0, :, chosen] / probe.config.group
        later = probe.length - 1 - chosen
        return cls(logits[chosen].half(), received.mean((0, 1)) / later)

    @classmethod
    def join(cls, parts: list[Births]) -> Births:
        """All of them."""
        return cls(torch.cat([p.logits for p in parts]), torch.cat([p.target for p in parts]))


def fit_paper(
    births: Births, steps: int, *, batch: int = 512, rate: float = 1e-3, seed: int = 0
) -> PaperModel:
    """Minimise the squared error of R (self-supervised, as the paper says).

    The second output is fitted to the squared errors that the first one leaves, by the
    likelihood of a normal variable (the gradient does not reach the first).
    """
    generator = torch.Generator().manual_seed(seed)
    count, vocab = births.logits.shape
    sample = births.logits[torch.randperm(count, generator=generator)[:4096]].float()
    shift, scale = sample.mean(0), sample.std()
    middle, unit = float(births.target.mean()), float(births.target.std())
    into = (torch.randn(vocab, HIDDEN, generator=generator) * vocab**-0.5).requires_grad_()
    bias = torch.zeros(HIDDEN, requires_grad=True)
    out = torch.zeros(HIDDEN, 2, requires_grad=True)
    start = [math.log(middle / (1 - middle)), 2 * math.log(unit)]
    last = torch.tensor(start, requires_grad=True)
    optimizer = torch.optim.AdamW([into, bias, out, last], lr=rate, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    for _ in range(steps):
        chosen = torch.randint(count, (batch,), generator=generator)
        x = (births.logits[chosen].float() - shift) / scale
        hidden = torch.relu(x @ into + bias)
        guess = (hidden @ out[:, 0] + last[0]).sigmoid()
        error = (births.target[chosen] - guess) / unit
        spread = hidden.detach() @ out[:, 1] + last[1] - 2 * math.log(unit)
        doubt = error.detach().square() * torch.exp(-spread) + spread
        loss = error.square().mean() + 0.5 * doubt.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        folded = into / scale
        return PaperModel(*(w.detach() for w in (folded, bias - shift @ folded, out, last)))
