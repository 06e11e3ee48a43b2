"""How fast this worker computes and swaps, for the choice between recompute and swap."""

from __future__ import annotations

from pigou.engine.preemption import Rates
from pigou.request import SECOND

#: Steps of fewer tokens tell nothing of the speed at which a prompt is computed.
_LEAST = 32
#: Weight of the newest step in the mean.
_NEW = 0.1


class RateMeter:
    """Follows the speed of prefill; the speed of swapping is measured once."""

    def __init__(self, swap: float, block_bytes: int) -> None:
        """Begin without a figure for prefill.

        Args:
            swap: bytes copied between device and host in a second.
            block_bytes: bytes in a block.
        """
        self._swap = swap
        self._block_bytes = block_bytes
        self._prefill = 0.0

    def observe(self, tokens: int, duration: int) -> Rates | None:
        """Take in a step of `tokens` in `duration` nanoseconds; return new rates, if any."""
        if tokens < _LEAST or duration <= 0:
            return None
        rate = tokens * SECOND / duration
        self._prefill += (rate - self._prefill) * (_NEW if self._prefill else 1.0)
        return Rates(self._prefill, self._swap, self._block_bytes)
