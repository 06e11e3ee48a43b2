"""What a cache that gave entries up is judged by: loss, divergence, attention kept, intervals.

Only NumPy: the peer's process computes with it as well as Pigou's.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]
Ints = NDArray[np.integer]
Bools = NDArray[np.bool_]


def log_softmax(logits: Floats) -> NDArray[np.float64]:
    """Return log-probabilities over the last axis, in double precision."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    total: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return total


def nll(logits: Floats, targets: Ints) -> NDArray[np.float64]:
    """Return the loss of each target, in nats.

    Args:
        logits: shape (..., vocab).
        targets: token ids, shape (...,).
    """
    chosen = np.take_along_axis(log_softmax(logits), targets[..., None].astype(np.int64), axis=-1)
    return np.asarray(-chosen[..., 0])


def divergence(full: Floats, cut: Floats) -> NDArray[np.float64]:
    """Return KL(full || cut) in nats, of two logits of shape (..., vocab)."""
    p, q = log_softmax(full), log_softmax(cut)
    return np.asarray((np.exp(p) * (p - q)).sum(axis=-1))


def present(kept: Ints, length: int) -> Bools:
    """Return which positions are kept.

    Args:
        kept: positions, shape (..., entries), in any order; negative ones stand for nothing.

    Returns:
        Shape (..., length).
    """
    flags = np.zeros((*kept.shape[:-1], length + 1), dtype=np.bool_)
    where = np.where(kept < 0, length, kept).astype(np.int64)
    np.put_along_axis(flags, where, True, axis=-1)
    return flags[..., :length]


def kept_mass(probabilities: Floats, flags: Bools) -> NDArray[np.float64]:
    """Return how much of the full cache's attention falls on what was kept.

    Args:
        probabilities: of the full cache, shape (..., heads, length).
        flags: positions kept by each KV head, shape (..., kv_heads, length).

    Returns:
        Shape (..., heads), each within 0 to 1.
    """
    group = probabilities.shape[-2] // flags.shape[-2]
    each = np.repeat(flags, group, axis=-2)
    return np.asarray((probabilities * each).sum(axis=-1, dtype=np.float64))


def interval(values: Floats, level: float = 0.95, draws: int = 2000) -> tuple[float, float]:
    """Return a bootstrap interval of a mean over items.

    Args:
        values: one for each item, shape (items,); of a pair of methods, give the differences.
        draws: resamples; their generator's seed is fixed.
    """
    if len(values) < 2:
        return float("nan"), float("nan")
    rng = np.random.default_rng(0)
    means = values[rng.integers(len(values), size=(draws, len(values)))].mean(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
