"""The prompts of late, that the toll policy sets a prompt beside."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

#: How many are kept: what most are like is known by then, and what they were like is forgotten.
_KEPT = 128


class Lately:
    """Rings of numbers, one a prompt.

    Views of them are as of now: `note` may write to them.
    """

    def __init__(self) -> None:
        self._sizes, self._reaches = _Ring(), _Ring()

    @property
    def sizes(self) -> NDArray[np.float64]:
        """Tokens that nobody had cached, shape (prompts,), in no order."""
        return self._sizes.values

    @property
    def reaches(self) -> NDArray[np.float64]:
        """Seconds that they would have waited for a prefill worker rather than go elsewhere.

        For those that had the choice, shape (prompts,), in no order.
        """
        return self._reaches.values

    def note(self, size: float, reach: float) -> None:
        """Take in a prompt; `reach` is NaN for one without a choice."""
        self._sizes.push(size)
        if not math.isnan(reach):
            self._reaches.push(reach)


class _Ring:
    def __init__(self) -> None:
        self._all = np.zeros(_KEPT)
        self._seen = 0

    @property
    def values(self) -> NDArray[np.float64]:
        return self._all[: min(self._seen, _KEPT)]

    def push(self, value: float) -> None:
        self._all[self._seen % _KEPT] = value
        self._seen += 1
