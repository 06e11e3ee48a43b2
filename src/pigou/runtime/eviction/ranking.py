"""Which entries go first, and what is lost with each block of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pigou.config import EvictionConfig
from pigou.request import Ints
from pigou.runtime.eviction.policy import Judged, Returns
from pigou.runtime.eviction.rank_kernels import rank as least


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
    config: EvictionConfig, judged: Judged, following: int, first: int, most: int, size: int
) -> Ranking:
    """Rank a row's entries.

    Sinks and recent tokens are none of them, nor what comes before `first`.

    Args:
        config: of eviction.
        judged: its entries' scores, by the policy, and positions.
        following: position of the row's next token.
        first: slot from which on entries may go.
        most: entries that may go.
        size: tokens in a block.

    Raises:
        ValueError: a return is not finite.
    """
    scores, positions = judged
    if not np.isfinite(scores).all():
        raise ValueError("the policy yields returns that are not finite")
    whole = scores.ndim == 1
    flat = np.ascontiguousarray(scores.reshape(1 if whole else -1, scores.shape[-1]))
    bits = flat.view(f"u{flat.itemsize}")
    places = positions.reshape(-1, positions.shape[-1])
    victims = np.empty((len(flat), most), dtype=np.int32)
    losses = np.zeros(most // size)
    stop = following - config.recent
    some = (first, config.sinks, stop, victims, losses, size)
    depth = least(flat, bits, places, *some)
    return Ranking(first, victims[:, :depth], losses[: depth // size], scores if whole else None)
