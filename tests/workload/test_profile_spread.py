"""What a profile reads from gaps: how steps of a plan differ, and how they scatter."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from pigou.workload.profiling.fit import CLASSES, Decodes, gaps_of, scatter, spreads
from pigou.workload.token_counter import Stream

STEP, MORE, PLAN = 1_000_000, 300_000, 8


def stream(times: NDArray[np.int64]) -> Stream:
    gaps = np.diff(times)
    return Stream(int(times[0]), int(times[-1]), len(times), None, None, len(times), "chunks", gaps)


def streams(late: int, noise: float = 0.0, steps: int = 80) -> list[Stream]:
    """Two streams; the second begins `late` steps after the first, with a plan after its own."""
    rng = np.random.default_rng(late)
    lengths = np.full(late + steps, STEP, dtype=np.float64)
    lengths[late - 1] = 5 * STEP  # the second one's prompt
    lengths[late::PLAN] += MORE
    lengths *= rng.uniform(1 - noise, 1 + noise, len(lengths)) if noise else 1.0
    ends = np.cumsum(lengths).astype(np.int64)
    return [stream(ends - 2_000), stream(ends[late - 1 :] + 2_000)]


def test_gaps_are_counted_from_the_step_in_which_the_last_stream_began() -> None:
    found = gaps_of(streams(3))
    assert found.n == 2
    assert len(found.seconds) == 159  # the first one ends a moment before the second
    long = found.seconds > (STEP + MORE / 2) / 1e9
    assert set(found.ages[long] % PLAN) == {0}
    assert not long[found.ages % PLAN != 0].any()


def test_the_rhythm_of_plans_is_found_and_leaves_no_scatter() -> None:
    seen = [gaps_of(streams(late)) for late in (3, 4, 6)]
    rows, factors = spreads([seen], [Decodes(2, 50.0, (STEP + MORE / PLAN) / 1e9)], PLAN)
    said = np.full(PLAN, -MORE / PLAN)
    said[0] += MORE
    assert rows[0][0] == 2
    assert rows[0][1] == pytest.approx(said / 1e9, abs=1e-9)
    assert sum(rows[0][1]) == pytest.approx(0.0, abs=1e-12)
    assert factors[0][1] == pytest.approx([1.0] * CLASSES, abs=1e-3)


def test_scatter_has_the_quantiles_that_were_drawn_and_a_mean_of_one() -> None:
    seen = [gaps_of(streams(late, 0.3, 4000)) for late in (3, 5)]
    usual = [(run, (STEP + MORE / PLAN) / 1e9) for run in seen]
    factors = np.array(scatter(usual, spreads([seen], [Decodes(2, 1.0, 1e-3)], PLAN)[0][0][1]))
    assert factors.mean() == pytest.approx(1.0)
    assert factors == pytest.approx(0.7 + 0.6 * (np.arange(CLASSES) + 0.5) / CLASSES, abs=0.02)


def test_what_was_seen_too_seldom_is_left_out() -> None:
    short = gaps_of(streams(3, steps=12))
    assert spreads([[short]], [Decodes(2, 1.0, 1e-3)], PLAN) == ((), ())
    rows, _ = spreads([[gaps_of(streams(3))]], [Decodes(2, 1.0, 1e-3)], 1)
    assert rows == ()
