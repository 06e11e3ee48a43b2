"""MoverSettings: the bounds of a mover."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pigou.request import SECOND


@dataclass(frozen=True, slots=True)
class MoverSettings:
    """Bounds of a mover.

    Attributes:
        queue_blocks: blocks that wait on a link at most, those under way included; but an idle link
            takes a job of any size.
        batch: blocks that a store is given at once.
        failures: in a row, that take a link down.
        pause: nanoseconds until a link that is down is probed; doubled each time,
        longest_pause: up to this.
        close_seconds: that `close` waits for what is queued.
        guesses: latency in seconds and bytes per second of a link before it was measured, by the
            name of the store; `other` for names that are not here.
    """

    queue_blocks: int = 4096
    batch: int = 64
    failures: int = 3
    pause: int = SECOND
    longest_pause: int = 60 * SECOND
    close_seconds: float = 5.0
    guesses: Mapping[str, tuple[float, float]] = field(
        default_factory=lambda: {
            "host": (1e-4, 5e9),
            "disk": (1e-3, 5e8),
            "other": (3e-2, 1e8),
        }
    )

    def __post_init__(self) -> None:
        """Refuse bounds that let nothing through."""
        for name in ("queue_blocks", "batch", "failures", "pause", "longest_pause"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
