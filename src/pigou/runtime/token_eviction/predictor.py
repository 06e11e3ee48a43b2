"""What a cache entry will be worth: mean and uncertainty of its logarithm."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

#: Time scales of the sums of attention that an entry received, in tokens.
SCALES = (float("inf"), 256.0, 32.0)
FOLD = 32  # queries after which these sums fade, together
#: Of the change of the output that a return sums up. Divergence is quadratic in the change of a
#: query's output; what goes in small pieces, many at once, adds up before it is squared.
POWER = 1.5
CONTENT = 2  # numbers an entry's own key and value are summed up in
FLOOR = 1e-4  # of a sum, so that its logarithm exists
#: Bounds of sigma's own logarithm; up to 4.5 sigmas a power mean is finite.
LOG_SIGMA_BOUNDS = (-4.0, math.log(4.5))
#: Files beside a model's own; no safetensors, which would be taken for a part of the model.
RETURNS, PAPER = "returns.npz", "returns-paper.npz"


def features(content: Tensor, masses: Tensor, age: Tensor) -> Tensor:
    """Put together what entries are scored by at one time.

    Args:
        content: shape (..., n, CONTENT).
        masses: shape (..., n, scales).
        age: shape (..., n).

    Returns:
        Shape (..., CONTENT + scales + 1, n): the long axis is last, as products and logarithms of
        it are several times quicker.
    """
    logs = torch.log(masses.mT + FLOOR)
    return torch.cat((content.mT, logs, torch.log1p(age).unsqueeze(-2)), dim=-2)


def unrotate(keys: Tensor, turns: Tensor) -> Tensor:
    """Take rotary embedding off keys again.

    Args:
        keys: shape (..., n, head_dim).
        turns: rows of `rotary_table` for their positions, shape (n, head_dim).

    Returns:
        Shape of `keys`; the amplitude that some models scale rotated keys by stays in.
    """
    cos, sin = turns.chunk(2, dim=-1)
    first, second = keys.chunk(2, dim=-1)
    scale = cos.square() + sin.square()
    turned = torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1)
    return turned / torch.cat((scale, scale), dim=-1).sqrt()


@dataclass(frozen=True, slots=True)
class ReturnModel:
    """Two small networks for each layer and KV head, over Z = layers * kv_heads.

    The first sums up an entry's key and value, once; the second scores it, whenever asked, by
    that and by the attention that it received. An entry's return is a mean of two: the change of
    the attention's output, behind the output product, were it dropped alone, to the power of
    `POWER`; and the squared error that it spares where others are dropped. Both are summed over
    the queries to come, discounted (docs/internals/token-eviction.md). Its logarithm is taken as
    normal.
    """

    birth_in: Tensor  # shape (Z, 2 * head_dim, hidden)
    birth_bias: Tensor  # shape (Z, 1, hidden)
    birth_out: Tensor  # shape (Z, hidden, CONTENT)
    value_in: Tensor  # shape (Z, CONTENT + scales + 1, hidden)
    value_bias: Tensor  # shape (Z, 1, hidden)
    value_out: Tensor  # to mean and log sigma, shape (Z, hidden, 2)
    value_last: Tensor  # shape (Z, 1, 2)

    def birth(self, keys: Tensor, values: Tensor) -> Tensor:
        """Sum up entries by their own key and value, each of shape (layers, kv_heads, n, head_dim).

        Args:
            keys: before rotation.

        Returns:
            Shape (layers, kv_heads, n, CONTENT), float32.
        """
        x = torch.cat((keys, values), dim=-1).float().flatten(0, 1)
        hidden = F.silu(torch.baddbmm(self.birth_bias, x, self.birth_in))
        return torch.bmm(hidden, self.birth_out).view(*keys.shape[:3], CONTENT)

    def value(self, content: Tensor, masses: Tensor, age: Tensor) -> tuple[Tensor, Tensor]:
        """Score entries now.

        Args:
            content: from `birth`, shape (layers, kv_heads, n, CONTENT).
            masses: attention received, summed over the KV head's query heads and discounted at
                each of `SCALES`, shape (layers, kv_heads, n, scales).
            age: tokens since the entry's own, shape (layers, kv_heads, n).

        Returns:
            Mean and standard deviation of the logarithm of the return, each of shape
            (layers, kv_heads, n).
        """
        x = features(content, masses, age).flatten(0, 1)
        hidden = F.silu(torch.baddbmm(self.value_bias.mT, self.value_in.mT, x), inplace=True)
        out = torch.baddbmm(self.value_last.mT, self.value_out.mT, hidden)
        mean, log = out.view(*age.shape[:-1], 2, -1).unbind(-2)
        return mean, log.clamp(*LOG_SIGMA_BOUNDS).exp()

    def save(self, path: Path) -> None:
        """Write the weights as an npz archive."""
        write_weights(path, self, torch.float32)

    @classmethod
    def load(cls, path: Path) -> ReturnModel:
        """Read what `save` wrote."""
        return cls(**read_weights(path, cls))


@dataclass(frozen=True, slots=True)
class PaperModel:
    """Token-PD's predictor: from the next-token logits at a token's birth to its return.

    One hidden layer of 256 units (seed token-pd, section 4 and 5). The return R is the fraction
    of the attention of the queries to come that will land on the token before its request ends,
    the mean over layers and heads. The paper does not say where its variance comes from: here it
    is a second output.
    """

    into: Tensor  # shape (vocab, 256)
    bias: Tensor  # shape (256,)
    out: Tensor  # to the logit of R and to log sigma^2, shape (256, 2)
    last: Tensor  # shape (2,)

    def birth(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Predict R, in [0, 1], and sigma^2, each of shape (n,), from logits of shape (n, vocab).

        A token's logits are those of the step that stores its keys and values.
        """
        hidden = torch.relu(torch.addmm(self.bias, logits.float(), self.into))
        mean, log_variance = torch.addmm(self.last, hidden, self.out).unbind(-1)
        return mean.sigmoid(), log_variance.clamp(-40.0, 0.0).exp()

    def save(self, path: Path) -> None:
        """Write the weights as an npz archive, in half precision."""
        write_weights(path, self, torch.float16)

    @classmethod
    def load(cls, path: Path) -> PaperModel:
        """Read what `save` wrote."""
        return cls(**read_weights(path, cls))


def write_weights(path: Path, model: Any, dtype: torch.dtype) -> None:
    """Write the fields of a dataclass of tensors as an npz archive, in this type."""
    arrays = {f.name: getattr(model, f.name).to(dtype).numpy() for f in fields(model)}
    with path.open("wb") as file:
        np.savez_compressed(file, **arrays)


def read_weights(path: Path, kind: type[Any]) -> dict[str, Tensor]:
    """Read the fields of a dataclass of tensors, float32, by name."""
    with np.load(path, allow_pickle=False) as arrays:
        return {f.name: torch.from_numpy(arrays[f.name]).float() for f in fields(kind)}


#: Trained on the bundled model and two of random weights; `tools/train_returns.py generic` trains
#: it on any number.
GENERIC = Path(__file__).with_name("generic.npz")
#: Columns of `GenericReturns.birth`: logarithms of the norms of key and value.
KEY_NORM, VALUE_NORM = 0, 1


def relative(now: Tensor) -> Tensor:
    """What entries are scored by, compared with those beside them; age stays as it is.

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
    """

    value_in: Tensor  # shape (2 + scales + 1, hidden)
    value_bias: Tensor  # shape (hidden,)
    value_out: Tensor  # to mean and log sigma, shape (hidden, 2)
    value_last: Tensor  # shape (2,)

    @staticmethod
    def birth(keys: Tensor, values: Tensor) -> Tensor:
        """Return logarithms of the norms, shape (..., n, 2)."""
        norms = torch.stack((keys.float().norm(dim=-1), values.float().norm(dim=-1)), dim=-1)
        return norms.clamp_min(1e-6).log()

    def value(self, content: Tensor, masses: Tensor, age: Tensor) -> tuple[Tensor, Tensor]:
        """Score entries, of which those of one layer and head are compared with each other."""
        now = features(content, masses, age).mT
        hidden = F.silu(relative(now) @ self.value_in + self.value_bias)
        mean, log_sigma = (hidden @ self.value_out + self.value_last).unbind(-1)
        size = content[..., VALUE_NORM].mean(-1, keepdim=True)
        return mean + POWER * size, log_sigma.clamp(*LOG_SIGMA_BOUNDS).exp()

    def save(self, path: Path) -> None:
        """Write the weights as an npz archive."""
        write_weights(path, self, torch.float32)

    @classmethod
    def load(cls, path: Path = GENERIC) -> GenericReturns:
        """Read what `save` wrote; what ships, by default."""
        return cls(**read_weights(path, cls))
