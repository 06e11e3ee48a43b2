from __future__ import annotations

import pytest

from pigou.cost.usage import (
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
    assert usd_per_million(1.0, 0) is None
