"""Statistics of the gaps between tokens."""

from __future__ import annotations

import numpy as np
import pytest

from pigou.request import SECOND
from pigou.sim.streams import ITLHistogram, _class_of


def test_gaps_are_known_to_a_thousandth_and_their_mean_exactly() -> None:
    rng = np.random.default_rng(0)
    values = rng.lognormal(17.0, 1.0, 10_000).astype(np.int64)
    gaps = ITLHistogram()
    for gap in values.tolist():
        gaps.histogram[_class_of(gap)] += 1
    gaps.sums[:] = len(values), values.sum()
    assert gaps.mean() == int(values.sum()) / len(values) / SECOND
    shares = np.array([50.0, 95.0, 99.0])
    exact = np.sort(values)[np.ceil(shares / 100 * len(values)).astype(int) - 1] / SECOND
    assert gaps.percentiles(shares) == pytest.approx(exact, rel=1e-3)
