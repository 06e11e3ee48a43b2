"""Laws of long prompts: rare, and far longer than the others."""

from __future__ import annotations

from pigou.windows.prompts import PromptLengths


def test_a_prompt_is_long_beside_the_last_thousand() -> None:
    lengths = PromptLengths()
    assert not lengths.is_long(100)
    for _ in range(1000):
        lengths.add(100)
    assert lengths.is_long(401)
    assert not lengths.is_long(400)
    for _ in range(1000):  # those of before are forgotten
        lengths.add(500)
    assert not lengths.is_long(401)


def test_lengths_that_a_fifth_has_are_not_long() -> None:
    lengths = PromptLengths()
    for number in range(100):
        lengths.add(1000 if number % 5 == 0 else 100)
    assert not lengths.is_long(900)
