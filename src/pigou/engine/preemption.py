"""Recompute or swap: what costs a preempted sequence less time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pigou.request import SECOND


@dataclass(frozen=True, slots=True)
class Rates:
    """What was measured on the machine.

    Attributes:
        prefill: tokens computed in a second.
        swap: bytes copied between device and host in a second.
        block_bytes: bytes in a block.
    """

    prefill: float
    swap: float
    block_bytes: int

    def __post_init__(self) -> None:
        """Refuse rates that no machine has."""
        for name in ("prefill", "swap", "block_bytes"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")


def recompute_seconds(tokens: int, rates: Rates, hit_tokens: int = 0) -> float:
    """Seconds to compute `tokens` again, without the `hit_tokens` that the cache will have."""
    return (tokens - hit_tokens) / rates.prefill


def swap_seconds(blocks: int, rates: Rates, hit_blocks: int = 0) -> float:
    """Seconds to copy `blocks` out, and those that the cache will not have in again."""
    return (2 * blocks - hit_blocks) * rates.block_bytes / rates.swap


def cheaper(
    tokens: int, blocks: int, rates: Rates, hit_tokens: int = 0, hit_blocks: int = 0
) -> Literal["recompute", "swap"]:
    """Choose how a sequence is preempted.

    Args:
        tokens: whose KV is on the device.
        blocks: that hold it.
        rates: as measured.
        hit_tokens: of those, tokens that will hit the prefix cache when it returns.
        hit_blocks: blocks that hold these.

    Returns:
        What takes fewer seconds; recompute when equal, as it needs no host memory.
    """
    again = recompute_seconds(tokens, rates, hit_tokens)
    moved = swap_seconds(blocks, rates, hit_blocks)
    return "swap" if moved < again else "recompute"


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
