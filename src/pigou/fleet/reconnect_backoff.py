"""The waits between tries to reach a server that all processes of a fleet use."""

from __future__ import annotations

import random
from typing import Annotated

import msgspec

from pigou.request import SECOND


class ReconnectBackoff(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds between tries, doubled by each failure; a random part of `jitter` is added.

    After an outage, workers come back at different times because of it.
    """

    min_s: Annotated[float, msgspec.Meta(gt=0)] = 0.5
    max_s: Annotated[float, msgspec.Meta(gt=0)] = 5.0
    jitter: Annotated[float, msgspec.Meta(ge=0)] = 0.5

    def wait_ns(self, failures: int, rng: random.Random) -> int:
        """Return the wait after so many failures in a row, at least 1, in nanoseconds."""
        wait_s = min(self.min_s * 2.0 ** min(failures - 1, 30), self.max_s)
        return round(wait_s * (1 + self.jitter * rng.random()) * SECOND)
