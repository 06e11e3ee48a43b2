"""Fitting a `ReturnModel` to examples."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from pigou.runtime.token_eviction.predictor import CONTENT, SCALES, ReturnModel, features
from returns.examples import Examples

BIRTH, VALUE = 32, 16  # hidden units
APART = 8  # every eighth example is held out, and calibrates sigma


class Fit:
    """Weights in training, over inputs of zero mean and unit variance."""

    def __init__(self, examples: Examples, seed: int = 0) -> None:
        self.examples = examples
        generator = torch.Generator().manual_seed(seed)
        z, _, width = examples.keys.shape
        raw = torch.cat((examples.keys, examples.values), dim=-1)
        self.shift, self.scale = _moments(raw)
        empty = torch.zeros(*examples.target.shape, CONTENT)
        now = features(empty, examples.masses, examples.age.expand_as(examples.target)).mT
        self.now_shift, self.now_scale = _moments(now)
        self.now_shift[..., :CONTENT], self.now_scale[..., :CONTENT] = 0, 1
        self.middle = examples.target.mean(1, keepdim=True)
        inputs = CONTENT + len(SCALES) + 1

        def draw(rows: int, columns: int) -> Tensor:
            size: float = rows**-0.5
            drawn = torch.randn(z, rows, columns, generator=generator) * size
            return drawn.requires_grad_()

        self.birth_in, self.birth_out = draw(2 * width, BIRTH), draw(BIRTH, CONTENT)
        self.value_in, self.value_out = draw(inputs, VALUE), draw(VALUE, 2)
        self.birth_bias = torch.zeros(z, 1, BIRTH, requires_grad=True)
        self.value_bias = torch.zeros(z, 1, VALUE, requires_grad=True)
        self.value_last = torch.zeros(z, 1, 2, requires_grad=True)
        self.raw = (raw - self.shift) / self.scale
        self.now = (now - self.now_shift) / self.now_scale
        self.generator = generator
        self.trained = self.raw.shape[1] * (APART - 1) // APART

    @property
    def weights(self) -> list[Tensor]:
        """All that is trained."""
        return [
            self.birth_in, self.birth_bias, self.birth_out,
            self.value_in, self.value_bias, self.value_out, self.value_last,
        ]  # fmt: skip

    def run(self, steps: int, batch: int = 1024, rate: float = 3e-3, decay: float = 2e-2) -> float:
        """Minimise the negative log-likelihood; returns its last running mean."""
        optimizer = torch.optim.AdamW(self.weights, lr=rate, weight_decay=decay, betas=(0.9, 0.98))
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
        mean, count = 0.0, self.trained
        for _ in range(steps):
            chosen = torch.randint(count, (batch,), generator=self.generator)
            loss = self.loss(chosen)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            mean += 0.02 * (loss.item() - mean)
        return mean

    def loss(self, chosen: Tensor) -> Tensor:
        """Gaussian negative log-likelihood of the logarithm."""
        error, spread = self.errors(chosen)
        return (0.5 * error.square() + spread).mean() + 0.5 * math.log(2 * math.pi)

    def errors(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Errors in sigmas, and log sigma, each of shape (Z, chosen)."""
        hidden = F.silu(torch.baddbmm(self.birth_bias, self.raw[:, chosen], self.birth_in))
        content = torch.bmm(hidden, self.birth_out)
        now = torch.cat((content, self.now[:, chosen, CONTENT:]), dim=-1)
        hidden = F.silu(torch.baddbmm(self.value_bias, now, self.value_in))
        out = torch.baddbmm(self.value_last, hidden, self.value_out)
        mean, spread = out[..., 0] + self.middle, out[..., 1].clamp(-4.0, 3.0)
        return (self.examples.target[:, chosen] - mean) * torch.exp(-spread), spread

    @torch.no_grad()
    def calibrate(self) -> Tensor:
        """Widen each head's sigma to the errors on the sequences that were not trained on.

        Returns:
            What sigma was multiplied by, shape (Z,).
        """
        apart = torch.arange(self.trained, self.raw.shape[1])
        error, _ = self.errors(apart)
        factor = error.square().mean(1).sqrt()
        self.value_last[:, 0, 1] += factor.log()
        return factor

    def model(self) -> ReturnModel:
        """The weights, with the scaling of inputs folded in."""
        with torch.no_grad():
            birth_in = self.birth_in / self.scale.transpose(1, 2)
            birth_bias = self.birth_bias - self.shift @ birth_in
            value_in = self.value_in / self.now_scale.transpose(1, 2)
            value_bias = self.value_bias - self.now_shift @ value_in
            last = self.value_last.clone()
            last[..., 0] += self.middle
            return ReturnModel(
                birth_in, birth_bias, self.birth_out.detach().clone(),
                value_in, value_bias, self.value_out.detach().clone(), last,
            )  # fmt: skip


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation over examples, shape (Z, 1, inputs)."""
    return x.mean(1, keepdim=True), x.std(1, keepdim=True).clamp_min(1e-4)
