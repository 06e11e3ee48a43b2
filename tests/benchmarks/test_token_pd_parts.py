"""The parts of benchmarks.token_pd.tables: its load, its clock, its bisection."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")

from benchmarks.token_pd.iso_perplexity import least_budget
from benchmarks.token_pd.load import (
    DISTANCE,
    OUTPUT,
    PROMPT,
    Texts,
    arrivals,
    busy_share,
    make_items,
    rate_for,
)
from benchmarks.token_pd.paper_tables import published, table
from benchmarks.token_pd.run import Figures, Run, Setting, plenty
from pigou.models import bundled_path
from pigou.runtime.models.load import LoadedModel, load

FIGURES = Figures(
    policy="fifo", streams=256, blocks=1536, requests=9, perplexity=40.0, exact=0.5,
    peak_bytes=100, mean_bytes=50.0, span=1.0, busy=0.9, steps=3, rate=2.0, capacity=2.0,
    p50=1.0, p95=2.0, at_once=3.0, most=4, short=0.5, preemptions=0, dropped=0,
)  # fmt: skip


@pytest.fixture(scope="module")
def texts() -> Texts:
    lines = [f"The {n}th lord of {n * 37 % 101} castles said nothing at all." for n in range(400)]
    return Texts(bundled_path(), "\n".join(lines), "\n".join(reversed(lines)))


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load(bundled_path(), "fp32")


def test_the_same_seed_draws_the_same_requests_and_times(texts: Texts) -> None:
    first, again, other = (
        arrivals(make_items(texts, 24, 4, seed), 5.0, 4, seed) for seed in (0, 0, 1)
    )
    for one, two in zip(first, again, strict=True):
        assert one.time == two.time
        assert np.array_equal(one.item.prompt, two.item.prompt)
        assert np.array_equal(one.item.forced, two.item.forced)
    assert [a.time for a in first] != [a.time for a in other]


def test_jobs_come_together_and_belong_to_one_tenant(texts: Texts) -> None:
    coming = arrivals(make_items(texts, 32, 8, 3), 5.0, 8, 3)
    for at in range(0, 32, 8):
        job = coming[at : at + 8]
        assert len({arrival.time for arrival in job}) == 1
        assert len({arrival.item.tenant for arrival in job}) == 1


def test_texts_are_cut_into_prompt_and_forced_within_the_lengths(texts: Texts) -> None:
    for item in make_items(texts, 40, 1, 0):
        if item.answer < 0:
            assert PROMPT[0] <= len(item.prompt) < PROMPT[1]
            assert OUTPUT[0] <= len(item.forced) <= OUTPUT[1]


def test_a_question_s_pairs_are_prompt_and_its_filler_is_forced(texts: Texts) -> None:
    for item in texts.questions(5, 0):
        told = texts.tokenizer.decode(item.prompt.tolist(), skip_special_tokens=False)
        asked = texts.tokenizer.decode(item.forced.tolist(), skip_special_tokens=False)
        answer = texts.tokenizer.decode([item.answer])
        key = asked.rpartition("@")[2]
        assert f"@{key}{answer}\n" in told
        assert "@" not in asked.removesuffix("@" + key)
        assert len(item.forced) > DISTANCE


@pytest.mark.parametrize("busy", [0.5, 0.9])
def test_the_rate_found_keeps_a_server_as_busy_as_asked(texts: Texts, busy: float) -> None:
    items = make_items(texts, 64, 4, 0)
    rate = rate_for(items, busy, 0.2, 4, 0)
    assert busy_share(arrivals(items, rate, 4, 0), 0.2) == pytest.approx(busy, abs=0.02)


@pytest.mark.parametrize("edge", [150, 333, 900])
def test_bisection_ends_on_both_sides_of_the_edge(edge: int) -> None:
    def run(blocks: int) -> Figures:
        return replace(FIGURES, blocks=blocks, perplexity=40.0 if blocks >= edge else 44.0)

    found = least_budget("x", run, 40.0, 100, 1000, rounds=30)
    assert found.good is not None
    assert found.bad is not None
    assert (found.bad.blocks, found.good.blocks) == (edge - 1, edge)


def test_a_policy_that_is_never_good_enough_has_no_least_budget() -> None:
    def run(blocks: int) -> Figures:
        return replace(FIGURES, blocks=blocks, perplexity=math.inf)

    found = least_budget("x", run, 40.0, 100, 1000, rounds=30)
    assert found.good is None


def test_a_table_sets_ratios_beside_the_paper_s() -> None:
    ours = replace(FIGURES, policy="pigou", capacity=2.6, p95=1.54)
    text = table([FIGURES, ours])
    assert "1.30 (1.33)" in text
    assert "0.77 (0.76)" in text
    assert published(256, "paper") == published(256, "pigou") == (31.6, 811, 94, 6.44, 78.2)
    assert published(64, "pigou") is None


def test_a_run_answers_all_and_stays_within_its_budget(model: LoadedModel, texts: Texts) -> None:
    items = make_items(texts, 6, 2, 0)
    coming = arrivals(items, float("inf"), 1, 0)
    wide = Run(model, Setting("none", 6, plenty(items, 6)))
    figures, done = wide(coming)
    assert figures.requests == len(done) == 6
    assert figures.busy == 1.0
    assert figures.preemptions == 0
    assert figures.span == pytest.approx(wide.busy / 1e9)
    narrow, tight = Run(model, Setting("none", 6, 40))(coming)
    block = wide.engine.cache.layout.block_bytes
    assert narrow.peak_bytes <= 40 * block < figures.peak_bytes
    assert narrow.preemptions > 0 or narrow.most < 6
    assert narrow.perplexity == pytest.approx(figures.perplexity, rel=1e-4)
    assert len(tight) == 6


def test_the_clock_jumps_over_idle_time(model: LoadedModel, texts: Texts) -> None:
    items = make_items(texts, 3, 1, 0)
    figures, done = Run(model, Setting("none", 2, 60))(arrivals(items, 0.05, 1, 0))
    assert figures.busy < 0.5
    assert figures.span > done[-1].arrival.time / 1e9
    assert figures.capacity > figures.rate
