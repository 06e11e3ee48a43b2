"""Laws of the prefix linter, on prompts whose answer is known."""

from __future__ import annotations

import random

import pytest

from pigou.diagnosis.prefix_lint import lint_blocks, lint_prefixes

SYSTEM = list(range(1000, 5000))


def stamped(count: int, *, first: bool, stamp: int = 16) -> list[list[int]]:
    """Prompts of a stamp and the same 4,000 tokens, in this order or the other."""
    rng = random.Random(1)
    stamps = [[rng.randrange(10**9) for _ in range(stamp)] for _ in range(count)]
    return [[*own, *SYSTEM] if first else [*SYSTEM, *own] for own in stamps]


@pytest.mark.parametrize("stamp", [16, 7])
def test_a_timestamp_before_the_same_4k_system_prompt(stamp: int) -> None:
    report = lint_prefixes(stamped(20, first=True, stamp=stamp))
    assert report.shared == 0.0
    (group,) = report.groups
    assert (group.prompts, group.block, group.token) == (20, 0, 0)
    assert group.recurring == pytest.approx(1.0)
    assert group.saved_tokens == pytest.approx(4000, abs=16)
    # 19 of 20 prompts would hit 4,000 of 4,000 + n tokens.
    assert report.possible == pytest.approx(0.95 * 4000 / (4000 + stamp), abs=0.005)


def test_a_stamp_behind_the_system_prompt_is_no_finding() -> None:
    report = lint_prefixes(stamped(20, first=False))
    assert report.groups == ()
    assert report.shared == pytest.approx(0.95 * 4000 / 4016, abs=1e-9)


def test_volatile_text_in_the_middle_is_named_with_its_block_and_text() -> None:
    prompts = [[*"You help. " * 16, *f"now {i:011d}#", *"The rules are long. " * 10]
               for i in range(5)]  # fmt: skip
    (group,) = lint_prefixes(prompts).groups
    assert group.block == 10
    assert group.text.startswith("now 0000000")
    assert group.recurring == pytest.approx(1.0)


def test_different_questions_have_nothing_to_move() -> None:
    rng = random.Random(2)
    prompts = [[*range(160), *(rng.randrange(10**9) for _ in range(100))] for _ in range(10)]
    assert lint_prefixes(prompts).groups == ()


def test_blocks_tell_where_prompts_part_and_no_more() -> None:
    report = lint_blocks([(1, 2, 100 + i, 200 + i) for i in range(8)], 512)
    (group,) = report.groups
    assert (group.prompts, group.block, group.token, group.recurring) == (8, 2, 1024, None)
    assert report.shared == pytest.approx(14 / 32)
