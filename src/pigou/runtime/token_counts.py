"""How often each token occurred, kept up step by step."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

_FIRST = 64


class TokenCounts:
    """Counts of the distinct tokens of a growing list.

    A step costs one look-up to add a token, and one pass over the distinct tokens to read them,
    however long the list is.
    """

    __slots__ = ("_counts", "_ids", "_places")

    def __init__(self, tokens: Iterable[int]) -> None:
        """Count these tokens."""
        self._places: dict[int, int] = {}
        self._ids = np.empty(_FIRST, dtype=np.int64)
        self._counts = np.zeros(_FIRST, dtype=np.int64)
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        """Count one further token."""
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._ids):
            self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._ids[place] = token
        self._counts[place] += 1

    @property
    def ids(self) -> NDArray[np.int64]:
        """Distinct tokens, in order of their first occurrence; a view."""
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> NDArray[np.int64]:
        """How often each of `ids` occurred; a view."""
        return self._counts[: len(self._places)]
