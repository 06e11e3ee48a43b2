from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lib.examples import examples

from pigou.workload.bench_config import LengthRange
from pigou.workload.prompts import (
    WORDS,
    PromptJob,
    PromptSource,
    Shape,
    jobs,
    make_prefixes,
    pieces,
)

IDS = PromptSource(list(range(100, 400)), running=False)


def draw(source: PromptSource, shape: Shape, count: int, seed: int = 0) -> list[PromptJob]:
    rng = np.random.default_rng(seed)
    prefixes = make_prefixes(source, shape, rng)
    return list(islice(jobs(source, shape, prefixes, rng), count))


@settings(max_examples=examples(50))
@given(
    low=st.integers(1, 60), more=st.integers(0, 60), prefixes=st.integers(0, 4),
    length=st.integers(1, 40), running=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_prompts_have_the_lengths_that_were_asked(
    low: int, more: int, prefixes: int, length: int, running: bool, seed: int
) -> None:
    shape = Shape(LengthRange(low, low + more), LengthRange(3, 5), prefixes, length)
    source = PromptSource(list(range(50)), running)
    for job in draw(source, shape, 30, seed):
        front = length if prefixes else 0
        assert front + low <= len(job.prompt) <= front + low + more
        assert 3 <= job.output <= 5
        assert len(job.prompt) + job.output <= shape.max_sequence_tokens


def test_both_ends_of_a_range_are_drawn() -> None:
    shape = Shape(LengthRange(4, 6), LengthRange(1, 2))
    made = draw(IDS, shape, 200)
    assert {len(job.prompt) for job in made} == {4, 5, 6}
    assert {job.output for job in made} == {1, 2}


def test_prompts_of_words_share_no_prefix_of_a_block() -> None:
    made = draw(IDS, Shape(LengthRange(64, 64), LengthRange(1, 1)), 500)
    assert len({tuple(job.prompt[:16]) for job in made}) == 500


def test_each_prompt_begins_with_its_shared_prefix_and_goes_on_by_itself() -> None:
    made = draw(IDS, Shape(LengthRange(32, 32), LengthRange(1, 1), 3, 48), 300)
    fronts = {job.prefix: set() for job in made}
    for job in made:
        fronts[job.prefix].add(tuple(job.prompt[:48]))
    assert sorted(fronts) == [0, 1, 2]
    assert all(len(front) == 1 for front in fronts.values())
    assert len(set.union(*fronts.values())) == 3
    assert len({tuple(job.prompt[48:]) for job in made}) == 300


def test_passages_are_the_text_as_it_runs() -> None:
    text = "It was  the best\nof times, it was the worst of times;"
    assert "".join(pieces(text)) == text
    source = PromptSource(pieces(text), running=True)
    round_ = "".join(pieces(text)) * 3
    for job in draw(source, Shape(LengthRange(5, 9), LengthRange(1, 1)), 50):
        assert isinstance(job.prompt, str)
        assert job.prompt in round_


def test_words_are_counted_by_the_tokens_that_they_make() -> None:
    source = PromptSource([f" {word}" for word in WORDS], running=False, tokens_per_unit=2.0)
    (job,) = draw(source, Shape(LengthRange(100, 100), LengthRange(1, 1)), 1)
    assert len(str(job.prompt).split()) == 50


def test_the_same_seed_gives_the_same_prompts_and_another_gives_others() -> None:
    shape = Shape(LengthRange(8, 64), LengthRange(1, 100), 2, 16)
    assert draw(IDS, shape, 20, 5) == draw(IDS, shape, 20, 5)
    assert draw(IDS, shape, 20, 5) != draw(IDS, shape, 20, 6)


def test_a_source_without_words_is_refused() -> None:
    with pytest.raises(ValueError, match="no words"):
        PromptSource([], running=True)
