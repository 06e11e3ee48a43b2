"""Context: how many tokens a stream holds, prompt and output."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

#: Samples are forgotten by half after so many more.
_HALF_LIFE = 128.0


class Context:
    """Running mean over streams, with forgetting."""

    def __init__(self) -> None:
        self._streams = self._tokens = 0.0

    def observe(self, streams: NDArray[np.float64], tokens: NDArray[np.float64]) -> None:
        """Take in samples: streams of a worker, and the tokens that they held; (n,) each."""
        keep = 0.5 ** (len(streams) / _HALF_LIFE)
        self._streams = keep * self._streams + float(streams.sum())
        self._tokens = keep * self._tokens + float(tokens.sum())

    @property
    def mean(self) -> float:
        """Tokens that a stream holds in the mean; 0 before any was seen."""
        return self._tokens / self._streams if self._streams > 0.0 else 0.0
