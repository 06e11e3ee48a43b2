"""What `tools.check_results` compares: figures of a page with those that a command prints."""

from __future__ import annotations

import pytest

from tools.check_results import CHECKS, RESULTS, Figure, compare, differs, table

PAGE = """
| loop | blocks | rho mean, most | hits |
|---|---|---|---|
| closed | 3,000 | 0.47, 0.70 | 97.4% |
| | `200` | 9.17, 10.4 | **3.9%** |
"""
HEADER = "| loop | blocks"


def test_a_figure_that_rounds_to_what_the_page_shows_is_the_same() -> None:
    figures = [
        Figure(("closed", "3,000"), 2, (0.4651, 0.7049)),
        Figure(("closed", "200"), 2, (9.1749, 10.36)),
        Figure(("closed", "200"), 3, (3.94,)),
    ]
    assert not list(compare(PAGE, HEADER, figures))


def test_a_figure_off_by_one_in_the_last_digit_is_told_with_its_row() -> None:
    (line,) = compare(PAGE, HEADER, [Figure(("closed", "200"), 3, (3.96,))])
    assert "closed | 200" in line
    assert "3.96" in line


@pytest.mark.parametrize("cell", ["", "-", "1.0, 2.0"])
def test_a_cell_with_fewer_or_more_numbers_differs(cell: str) -> None:
    assert differs(cell, (1.0,))


def test_a_row_that_the_page_does_not_have_is_told() -> None:
    (line,) = compare(PAGE, HEADER, [Figure(("open", "200"), 3, (3.9,))])
    assert "0 rows" in line


def test_a_table_that_is_gone_is_an_error() -> None:
    with pytest.raises(LookupError, match="no table"):
        table(PAGE, "| nothing")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_every_check_finds_its_table(check: object) -> None:
    assert table((RESULTS / check.page).read_text(), check.header)  # type: ignore[attr-defined]


@pytest.mark.slow
def test_the_routing_games_are_as_on_the_page() -> None:
    from tools.check_results import main

    assert main(["--only", "games"]) == 0
