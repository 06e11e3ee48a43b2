"""What a cached block is worth when it is used: the seconds of prefill that it saves."""

from __future__ import annotations

from dataclasses import dataclass

from pigou.kv.block import Block


@dataclass(frozen=True, slots=True)
class Worth:
    """Seconds that one use of a block saves over recomputing it.

    Recomputing a block at depth d of its chain takes `base + slope * d` seconds more than not
    having to: a linear part, and attention over what comes before it. From a tier it comes back
    in `restore * size` seconds, its link's time. What a whole read costs once (a seek, a round
    trip) is no block's own, and left to who decides whether to read.

    Attributes:
        base: seconds to compute a block at the beginning of a prompt.
        slope: seconds more for each block before it.
        restore: seconds for each byte that is read back.
    """

    base: float = 1.0
    slope: float = 0.0
    restore: float = 0.0

    def __post_init__(self) -> None:
        """Refuse negative seconds."""
        for name in ("base", "slope", "restore"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 0")

    def saved(self, block: Block) -> float:
        """Return the seconds that a hit of this block saves, at least 0."""
        return max(0.0, self.base + self.slope * block.depth - self.restore * block.size)

    def recompute(self, depth: int, count: int = 1) -> float:
        """Return the seconds to compute `count` blocks of which the first is at `depth`."""
        return count * self.base + self.slope * (count * depth + count * (count - 1) / 2)
