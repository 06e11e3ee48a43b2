"""What is remembered of tokens that were given up, so that they can be computed again."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pigou.request import Ints
from pigou.runtime.eviction.policy import Floats


def _no_returns() -> NDArray[np.float64]:
    return np.empty(0)


@dataclass(slots=True)
class Dropped:
    """Whole tokens that a request gave up, those of the highest return first.

    Attributes:
        positions: shape (n,), int32.
        returns: that they were given up at, shape (n,).
        data: their side data, of one head, shape (1 + fields, n).
    """

    positions: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    returns: NDArray[np.float64] = field(default_factory=_no_returns)
    data: Floats = field(default_factory=lambda: np.empty((0, 0), dtype=np.float32))

    def add(self, positions: Ints, returns: NDArray[np.floating], data: Floats) -> None:
        """Remember tokens."""
        old = self.data if len(self.positions) else data[:, :0]
        everyone = np.concatenate((self.returns, returns.astype(np.float64)))
        order = np.argsort(-everyone, kind="stable")
        self.positions = np.concatenate((self.positions, positions))[order]
        self.returns = everyone[order]
        self.data = np.concatenate((old, data), axis=1)[:, order]

    def take(self, count: int) -> tuple[Ints, Floats]:
        """Forget the `count` tokens of the highest return, and give their positions and data.

        Both are in the order of positions.

        Raises:
            ValueError: there are fewer.
        """
        if count > len(self.positions):
            known = len(self.positions)
            raise ValueError(f"{count} tokens are to come back; {known} were given up")
        order = np.argsort(self.positions[:count])
        taken = self.positions[:count][order], self.data[:, :count][:, order]
        self.positions, self.returns = self.positions[count:], self.returns[count:]
        self.data = self.data[:, count:]
        return taken

    def gains(self, size: int, penalty: float) -> NDArray[np.float64]:
        """Return what comes back with each further whole block of tokens, shape (blocks,).

        Each token's penalty is taken off.
        """
        blocks = len(self.returns) // size
        gains: NDArray[np.float64] = self.returns[: blocks * size].reshape(blocks, size).sum(1)
        return gains - penalty * size

    def cut(self, length: int) -> None:
        """Forget tokens from position `length` on."""
        kept = self.positions < length
        self.positions, self.returns = self.positions[kept], self.returns[kept]
        self.data = self.data[:, kept]
