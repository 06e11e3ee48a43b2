"""What a cache entry will be worth, where nobody has trained a predictor for the model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from pigou.runtime.eviction.returns import POWER, SPREAD, features, read_weights, write_weights

#: Trained on the bundled model and two of random weights; `tools/train_returns.py generic` trains
#: it on any number.
GENERIC = Path(__file__).with_name("generic.npz")


def relative(now: Tensor) -> Tensor:
    """What entries are judged by, compared with those beside them; age stays as it is.

    Args:
        now: from `features`, turned, shape (..., entries, inputs).

    Returns:
        The same shape.
    """
    middle = now.mean(-2, keepdim=True)
    middle[..., -1] = 0
    return now - middle


@dataclass(frozen=True, slots=True)
class GenericReturns:
    """One small network for all models, layers and heads.

    It knows an entry by the norms of its key and value and by the attention that it received, all
    in relation to the entries beside it. The return's unit is the norm of a value, to the power
    of `POWER`: the output product is not looked at. Methods are those of `ReturnModel`.

    Attributes:
        value_in: shape (2 + scales + 1, hidden).
        value_bias: shape (hidden,).
        value_out: to mean and log sigma, shape (hidden, 2).
        value_last: shape (2,).
    """

    value_in: Tensor
    value_bias: Tensor
    value_out: Tensor
    value_last: Tensor

    @staticmethod
    def birth(keys: Tensor, values: Tensor) -> Tensor:
        """Return logarithms of the norms, shape (..., n, 2)."""
        norms = torch.stack((keys.float().norm(dim=-1), values.float().norm(dim=-1)), dim=-1)
        return norms.clamp_min(1e-6).log()

    def value(self, content: Tensor, masses: Tensor, age: Tensor) -> tuple[Tensor, Tensor]:
        """Judge entries, of which those of one layer and head are compared with each other."""
        now = features(content, masses, age).mT
        hidden = F.silu(relative(now) @ self.value_in + self.value_bias)
        out = hidden @ self.value_out + self.value_last
        size = content[..., 1].mean(-1, keepdim=True)
        return out[..., 0] + POWER * size, out[..., 1].clamp(*SPREAD).exp()

    def save(self, path: Path) -> None:
        """Write the weights as an npz archive."""
        write_weights(path, self, torch.float32)

    @classmethod
    def load(cls, path: Path = GENERIC) -> GenericReturns:
        """Read what `save` wrote; what ships, by default."""
        return cls(**read_weights(path, cls))
