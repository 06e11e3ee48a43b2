"""The theory of what is served live: pure functions, no clock.

`docs/internals/theory.md` has the results, and counterexamples to common claims.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]
