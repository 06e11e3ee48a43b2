"""The theory of what is served live: pure functions, no clock. See `docs/internals/theory.md`.

Georgiou 2026 is "The Price of Anarchy in Disaggregated Inference".
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]
