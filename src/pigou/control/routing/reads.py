"""What each worker would read from another's cache, and what that costs it."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]
Seconds = NDArray[np.float64]


class Reads(msgspec.Struct, eq=False):
    """One entry a worker, (workers,): what it would do if it computed the prompt.

    Attributes:
        source: row of the worker that it reads from; -1 where it does better without.
        ready: leading tokens that it would not compute: read, or its own in any tier.
        host: blocks of its own that it would bring back from host memory.
        storage: the same from disk and object storage.
        seconds: that reading takes, 0 where it does not.
        saves: seconds that reading saves, its own taken off; 0 where it does not.
    """

    source: Counts
    ready: Counts
    host: Counts
    storage: Counts
    seconds: Seconds
    saves: Seconds
