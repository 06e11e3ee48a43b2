"""Which entries go first, and what is lost with each block of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pigou.config import EvictionConfig
from pigou.request import Ints
from pigou.runtime.eviction import kernels
from pigou.runtime.eviction.policy import Entries, Returns


@dataclass(frozen=True, slots=True)
class Ranking:
    """The entries of a row that would go first.

    Attributes:
        first: slot from which on they were sought.
        slots: of each head, those of the least return first, shape (layers * kv_heads, depth); or
            (1, depth) for whole tokens.
        losses: return lost with each further block of them, shape (depth // block size,).
        returns: of whole tokens, by slot, shape (n,); None where heads choose for themselves.
    """

    first: int
    slots: Ints
    losses: NDArray[np.float64]
    returns: Returns | None


def rank(
    config: EvictionConfig, entries: Entries, scores: Returns, first: int, most: int, size: int
) -> Ranking:
    """Rank a row's entries.

    Sinks and recent tokens are none of them, nor what comes before `first`.

    Args:
        config: of eviction.
        entries: of the row.
        scores: of them, from the policy.
        first: slot from which on entries may go.
        most: entries that may go.
        size: tokens in a block.

    Raises:
        ValueError: a return is not finite.
    """
    if not np.isfinite(scores).all():
        raise ValueError("the policy yields returns that are not finite")
    whole = scores.ndim == 1
    heads = 1 if whole else entries.data.shape[0] * entries.data.shape[1]
    flat = np.ascontiguousarray(scores.reshape(heads, -1))
    ids = entries.data.view(np.int32).reshape(-1, *entries.data.shape[2:])
    victims = np.empty((heads, most), dtype=np.int32)
    losses = np.zeros(most // size)
    stop = entries.next - config.recent
    depth = kernels.rank(flat, ids, first, config.sinks, stop, victims, losses, size)
    return Ranking(first, victims[:, :depth], losses[: depth // size], scores if whole else None)
