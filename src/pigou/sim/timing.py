"""The face of a timing model: how long a step of a worker takes."""

from __future__ import annotations

from typing import Protocol

import msgspec
import numpy as np

from pigou.request import Ints, Nanos
from pigou.sim.moment import Moment


class Batch(msgspec.Struct):
    """What one step computes; entry i is one sequence.

    Attributes:
        counts: tokens that it computes, shape (n,); 1 for a decode.
        kv_lens: its cache entries before the step, shape (n,).
        samples: whether it yields a token, shape (n,).
        moment: which step of which worker it is, of several the first; None for any: such steps
            take what they take in the mean.
    """

    counts: Ints
    kv_lens: Ints
    samples: np.ndarray
    moment: Moment | None = None

    @property
    def tokens(self) -> int:
        """Tokens of the whole step."""
        return int(self.counts.sum())


class Timing(Protocol):
    """Seconds of computation, as integer nanoseconds."""

    def durations(self, batch: Batch, repeat: int) -> Nanos:
        """Return the time of each of `repeat` steps, shape (repeat,), at least 1 ns each.

        The array is new, and the caller's to write to.

        Step i is the same batch i steps after its moment: with i times its `counts` more cache
        entries. The vector equals, to the last digit, what `repeat` calls for one step each would
        return.
        """
        ...
