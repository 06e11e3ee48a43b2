"""Fitting `GenericReturns` to examples of several models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from make_random_checkpoint import Shape, write_checkpoint
from pigou.runtime.token_eviction.predictor import (
    CONTENT,
    POWER,
    SCALES,
    GenericReturns,
    features,
    relative,
)
from returns.examples import Examples

HIDDEN = 16
#: Models of random weights that it is trained on beside others, of seeds from 1 on.
SHAPES = (
    Shape(),
    Shape("qwen3", hidden=320, layers=3, heads=10, kv_heads=2),
    Shape("qwen2", layers=3, heads=4, kv_heads=2, head_dim=64),
    Shape("mistral", hidden=192, layers=6, heads=6, kv_heads=6),
    Shape(hidden=384, layers=2, heads=12, kv_heads=4, tie=True),
)


def random_models(folder: Path) -> Iterator[Path]:
    """Write a model of each of `SHAPES` to a folder."""
    for seed, shape in enumerate(SHAPES, start=1):
        write_checkpoint(folder / str(seed), shape, dtype="float32", seed=seed)
        yield folder / str(seed)


def fit_generic(
    models: list[Examples], each: int, steps: int, *, rate: float = 3e-3, seed: int = 0
) -> GenericReturns:
    """Maximise the likelihood of the logarithm, over all models, layers and heads alike.

    Args:
        models: examples of each model; as many steps go to the one as to the other.
        each: entries that are looked at together, one after another in the examples: what is
            relative is relative to these.
        rate: highest learning rate.
    """
    generator = torch.Generator().manual_seed(seed)
    data = [_grouped(examples, each) for examples in models]
    inputs = CONTENT + len(SCALES) + 1
    weights = [
        torch.randn(inputs, HIDDEN, generator=generator) * inputs**-0.5,
        torch.zeros(HIDDEN),
        torch.randn(HIDDEN, 2, generator=generator) * HIDDEN**-0.5,
        torch.zeros(2),
    ]
    for weight in weights:
        weight.requires_grad_()
    optimizer = torch.optim.AdamW(weights, lr=rate, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    into, bias, out, last = weights
    for step in range(steps):
        x, target = data[step % len(data)]
        chosen = torch.randint(len(target), (2048,), generator=generator)
        both = F.silu(x[chosen] @ into + bias) @ out + last
        spread = both[:, 1].clamp(-4.0, 3.0)
        error = (target[chosen] - both[:, 0]) * torch.exp(-spread)
        loss = (0.5 * error.square() + spread).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return GenericReturns(*(weight.detach() for weight in weights))


def _grouped(examples: Examples, each: int) -> tuple[Tensor, Tensor]:
    """Inputs (n, inputs) and targets (n,), relative within groups of `each`."""
    content = GenericReturns.birth(examples.keys, examples.values)
    now = features(content, examples.masses, examples.age.expand_as(examples.target)).mT
    groups = now.unflatten(1, (-1, each))
    size = groups[..., CONTENT - 1].mean(-1, keepdim=True)
    target = examples.target.unflatten(1, (-1, each)) - POWER * size
    return relative(groups).flatten(0, 2), target.flatten()
