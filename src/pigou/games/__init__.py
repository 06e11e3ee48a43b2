"""The theory of what is served live: pure functions, no clock.

- ``latency``: the cost law of a worker, and its fit from observations
- ``price_of_anarchy``: observed cost over optimal cost, from a live fleet
- ``queueing``: waits of the textbook queues
- ``replication``: what another copy of a cached prefix is worth

`docs/internals/theory.md` has the results, and the counterexamples to what is commonly claimed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]
