from __future__ import annotations

import math

import pytest

from pigou.cost.token_cost import (
    step_shares,
    step_tolls,
    storage_usd_per_reuse,
    usd_per_million,
    usd_per_million_at,
)


@pytest.mark.parametrize(
    ("usd", "gpus", "tok_s", "wanted"), [(2.5, 1, 5333, 0.1302), (4.0, 8, 21_913.22, 0.4056)]
)
def test_dollars_of_a_million_tokens_are_the_known_answers(
    usd: float, gpus: int, tok_s: float, wanted: float
) -> None:
    assert round(usd_per_million_at(usd, gpus, tok_s), 4) == wanted


def test_tokens_outside_the_objective_make_those_inside_dearer() -> None:
    whole = usd_per_million_at(2.5, 1, 5333)
    assert usd_per_million_at(2.5, 1, 5333, attained=0.5) == pytest.approx(2 * whole)


def test_no_tokens_have_no_price() -> None:
    assert math.isnan(usd_per_million(1.0, 0))


def test_shares_of_a_step_add_up_and_tolls_leave_the_weights_unpaid() -> None:
    sizes, weights = [1e9, 3e9, 0.0], 16e9
    shares, tolls = step_shares(sizes, weights), step_tolls(sizes, weights)
    assert sum(shares) == pytest.approx(1.0)
    assert sum(tolls) == pytest.approx(1.0 - weights / 20e9)
    assert [a - b for a, b in zip(shares, tolls, strict=True)] == pytest.approx([16 / 60] * 3)


def test_storage_of_a_reuse_is_bytes_times_seconds_over_reuses() -> None:
    assert storage_usd_per_reuse(2e-15, 1e9, 100.0, 4) == pytest.approx(5e-5)
