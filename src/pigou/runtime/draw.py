"""Random draws keyed by (seed, position): the same wherever and beside whomever they are made."""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 2**64 - 1


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1) that depends on the seed and the position alone.

    SplitMix64's output function (Steele, Lea, Flood 2014), once for each key; the top 52 bits.
    """
    state = _mix(_mix(seed & _MASK) + position)
    return (state >> 12) * 2.0**-52


def choose(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Invert each row's cumulative distribution, in the order of the vocabulary.

    Args:
        probabilities: shape (n, vocab), not negative, each row with a positive sum.
        uniforms: shape (n,), float64, in [0, 1).

    Returns:
        Tokens, shape (n,), int64; never one of probability 0. A row without any probability
        (everything is forbidden) gives the last token.
    """
    sums = probabilities.cumsum(-1, dtype=torch.float64)
    targets = uniforms.unsqueeze(-1) * sums[:, -1:]
    tokens = torch.searchsorted(sums, targets, right=True).squeeze(-1)
    return tokens.clamp_(max=probabilities.shape[-1] - 1)


def _mix(key: int) -> int:
    state = (key + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)
