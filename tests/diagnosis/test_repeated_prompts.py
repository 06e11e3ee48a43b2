"""Laws of prompts that come again: only after an attempt that was not served, and soon."""

from __future__ import annotations

import numpy as np

from pigou.request import Request
from pigou.windows.prompts import RepeatedPrompts, prompt_key


def test_a_prompt_counts_again_only_after_an_attempt_that_was_not_served() -> None:
    prompts = RepeatedPrompts()
    assert not prompts.arrive("1", "p", 0.0)
    assert not prompts.arrive("2", "p", 1.0)  # beside it: no retry
    prompts.end("1", 2.0, served=True)
    assert not prompts.arrive("3", "p", 3.0)
    prompts.end("2", 4.0, served=False)
    assert prompts.arrive("4", "p", 5.0)
    assert not prompts.arrive("4", "p", 6.0)  # the same request, at another worker
    assert prompts.count == 1


def test_a_minute_later_it_is_no_retry() -> None:
    prompts = RepeatedPrompts()
    prompts.arrive("1", "p", 0.0)
    prompts.end("1", 1.0, served=False)
    assert not prompts.arrive("2", "p", 62.0)


def test_a_prompt_without_a_full_block_has_no_key() -> None:
    assert prompt_key(Request("a", 5, 1)) is None
    keys = {16: np.array([1, 2], dtype=np.uint64)}
    assert prompt_key(Request("a", 40, 1, keys=keys)) == ("", 40, 2)
