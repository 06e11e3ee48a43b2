"""Laws that every timing model keeps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from timing_tables import write_tables

from pigou.config import ConfigError
from pigou.models.gpus import GPUS
from pigou.models.read import architecture
from pigou.sim.timing import RooflineTiming, StepShape, Timing
from pigou.sim.timing_models import build_timing
from pigou.sim.timing_profile import profile


@pytest.fixture(scope="module", params=["roofline", "roofline-moe-tp2", "profile"])
def timing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Timing:
    made = make(request.param, tmp_path_factory)
    made.durations(batch([(1, 0)]), 1)  # compiles
    return made


def make(name: str, tmp_path_factory: pytest.TempPathFactory) -> Timing:
    if name == "roofline":
        return RooflineTiming(architecture("llama-3.1-8b"), GPUS["h100"])
    if name == "roofline-moe-tp2":
        return RooflineTiming(architecture("qwen3-30b-a3b"), GPUS["rtxpro6000"], 2)
    folder = tmp_path_factory.mktemp("profile")
    write_tables(folder)
    return profile(folder, architecture("llama-3.1-8b"), GPUS["rtx4090"], 1)


def batch(entries: list[tuple[int, int]]) -> StepShape:
    """Entries of (tokens to compute, cached tokens); all sample."""
    counts, kv_lens = (np.array(column, dtype=np.int32) for column in zip(*entries, strict=True))
    return StepShape(counts, kv_lens, np.ones(len(entries), dtype=bool))


ENTRY = st.tuples(st.sampled_from([1, 1, 1, 2, 7, 16, 100, 513, 3000]), st.integers(0, 20_000))
DECODE = st.tuples(st.just(1), st.integers(0, 20_000))


@given(
    entries=st.one_of(
        st.lists(DECODE, min_size=1, max_size=300), st.lists(ENTRY, min_size=1, max_size=20)
    ),
    repeat=st.integers(1, 40),
)
def test_many_steps_take_to_the_digit_what_single_ones_take(
    timing: Timing, entries: list[tuple[int, int]], repeat: int
) -> None:
    together = timing.durations(batch(entries), repeat)
    assert together.shape == (repeat,)
    assert together.dtype == np.int64
    for step in range(repeat):
        later = [(tokens, kv + step * tokens) for tokens, kv in entries]
        assert timing.durations(batch(later), 1)[0] == together[step]


@given(entries=st.lists(ENTRY, min_size=1, max_size=20))
def test_every_step_takes_time_and_only_finite_time(
    timing: Timing, entries: list[tuple[int, int]]
) -> None:
    assert 1 <= timing.durations(batch(entries), 1)[0] < 3600 * 10**9


@given(entries=st.lists(DECODE, min_size=1, max_size=64), more=st.integers(1, 5000))
def test_longer_decodes_take_no_less(
    timing: Timing, entries: list[tuple[int, int]], more: int
) -> None:
    longer = [(tokens, kv + more) for tokens, kv in entries]
    before = timing.durations(batch(entries), 1)[0]
    assert timing.durations(batch(longer), 1)[0] >= before - 1


@given(chunk=st.integers(2, 4000), more=st.integers(1, 2000), kv=st.integers(0, 8000))
def test_longer_prompts_take_no_less(timing: Timing, chunk: int, more: int, kv: int) -> None:
    before = timing.durations(batch([(chunk, kv)]), 1)[0]
    assert timing.durations(batch([(chunk + more, kv)]), 1)[0] >= before - 1


@given(chunk=st.integers(2, 2000), parts=st.integers(2, 4))
def test_several_short_prompts_take_no_more_attention_than_one_long(
    timing: Timing, chunk: int, parts: int
) -> None:
    one = timing.durations(batch([(chunk * parts, 0)]), 1)[0]
    several = timing.durations(batch([(chunk, 0)] * parts), 1)[0]
    assert several <= one + 5_000_000


@pytest.mark.parametrize(
    ("text", "word"),
    [("law:9b", "340b"), ("law:itl_a=0", "itl_a"), ("law:340b,x=1", "x"), ("magic", "roofline"),
     ("roofline", "--model"), ("profile", "folder")],
)  # fmt: skip
def test_a_timing_that_cannot_be_had_is_refused(text: str, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        build_timing(text, "", "", 1)
