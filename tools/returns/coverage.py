"""Whether predicted uncertainty is what it says, on examples that were not trained on."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pigou.runtime.token_eviction.predictor import PaperModel, ReturnModel
from returns.collect import Collected
from returns.examples import Examples

#: Sigmas either side, and the share of a normal variable within them.
BANDS = ((0.6745, 0.5), (1.0, 0.683), (1.645, 0.9), (1.96, 0.95))


def coverage(data: Collected, model: ReturnModel, paper: PaperModel) -> Iterator[str]:
    """Lines of a report: coverage by layer and head, then of the paper's predictor."""
    mean, sigma = predict(model, data.examples)
    error = data.examples.target - mean
    yield from _rows("pigou", error, sigma, data.examples.target)
    guess, variance = paper.birth(data.births.logits)
    missed = (data.births.target - guess).unsqueeze(0)
    yield from _rows("paper", missed, variance.sqrt().unsqueeze(0), data.births.target[None])


def predict(model: ReturnModel, examples: Examples) -> tuple[Tensor, Tensor]:
    """Mean and sigma of examples, each of shape (Z, n)."""
    content = model.birth(examples.keys.unsqueeze(1), examples.values.unsqueeze(1))
    age = examples.age.expand_as(examples.target).unsqueeze(1)
    mean, sigma = model.value(content, examples.masses.unsqueeze(1), age)
    return mean[:, 0], sigma[:, 0]


def _rows(name: str, error: Tensor, sigma: Tensor, target: Tensor) -> Iterator[str]:
    yield f"{name}: share of examples within k sigma of the mean"
    yield "head   " + "".join(f"{share:>9.1%}" for _, share in BANDS) + "   explained   sigma"
    for head, (err, sig) in enumerate(zip(error, sigma, strict=True)):
        yield _row(f"{head}", err, sig, target[head])
    if len(error) > 1:
        yield _row("all", error.flatten(), sigma.flatten(), target.flatten())


def _row(name: str, error: Tensor, sigma: Tensor, target: Tensor) -> str:
    z = (error / sigma).abs()
    shares = "".join(f"{(z < width).float().mean():>9.1%}" for width, _ in BANDS)
    explained = 1 - error.square().mean() / target.var()
    return f"{name:7s}{shares}{explained:>12.1%}{torch.mean(sigma):>8.2g}"
