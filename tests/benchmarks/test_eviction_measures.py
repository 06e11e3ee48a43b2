"""What benchmarks/token_eviction/quality.py measures with, against cases worked out by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.token_eviction.budget import Budget, budget
from benchmarks.token_eviction.metrics import divergence, interval, kept_mass, nll, present
from benchmarks.token_eviction.reference import mass
from benchmarks.token_eviction.table import KL, NLL, Cell, above, baselines, closed, difference
from benchmarks.token_eviction.task import Meter, Outcome, Prepared, Task
from benchmarks.token_eviction.tracker import places


def test_loss_is_minus_the_log_of_the_targets_share() -> None:
    logits = np.log(np.array([[[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]], dtype=np.float32))
    found = nll(logits, np.array([[1, 2]]))
    np.testing.assert_allclose(found, [[np.log(4), -np.log(0.8)]], atol=1e-6)


def test_divergence_is_that_of_two_coins() -> None:
    full, cut = np.log(np.array([[0.5, 0.5]])), np.log(np.array([[0.25, 0.75]]))
    expected = 0.5 * np.log(0.5 / 0.25) + 0.5 * np.log(0.5 / 0.75)
    np.testing.assert_allclose(divergence(full, cut), [expected])
    np.testing.assert_allclose(divergence(full, full + 3.0), [0.0], atol=1e-12)


def test_kept_mass_counts_each_query_head_on_its_own_kv_heads_entries() -> None:
    probabilities = np.array([[0.1, 0.2, 0.7], [0.3, 0.3, 0.4], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]])
    flags = present(np.array([[2, 0], [1, -1]]), 3)
    assert flags.tolist() == [[True, False, True], [False, True, False]]
    np.testing.assert_allclose(kept_mass(probabilities, flags), [0.8, 0.7, 0.5, 0.0])


def test_an_interval_holds_the_mean_and_vanishes_where_nothing_varies() -> None:
    values = np.random.default_rng(1).normal(2.0, 1.0, 400)
    low, high = interval(values)
    assert low < values.mean() < high
    assert high - low == pytest.approx(2 * 1.96 * values.std() / 20, rel=0.15)
    assert interval(np.full(5, 3.0)) == (3.0, 3.0)


@given(st.integers(4, 40), st.integers(1, 40), st.integers(0, 2**16))
def test_entries_are_found_by_their_bits(whole: int, part: int, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    keys = torch.randn((2, 3, whole, 8), generator=rng)
    order = torch.stack(
        [torch.randperm(whole, generator=rng)[: min(part, whole)] for _ in range(6)]
    ).view(2, 3, -1)
    kept = keys.gather(2, order.unsqueeze(-1).expand(-1, -1, -1, 8))
    assert torch.equal(places(keys, kept), order)


def test_an_entry_of_no_cache_is_not_found() -> None:
    with pytest.raises(RuntimeError, match="none of the cache's"):
        places(torch.zeros((1, 4, 2)), torch.ones((1, 1, 2)))


def _streamed(length: int = 64) -> Task:
    return Task("streamed", "", length, 0, 16, 32, 8)


def test_a_share_is_whole_chunks_and_a_stream_leaves_room_for_the_next() -> None:
    assert budget(_streamed(), 0.5) == Budget(0.5, 32, 16)
    cut = Task("cut", "", 80, 64, 16, 64, 8)
    assert budget(cut, 0.5) == Budget(0.5, 32, 32)
    with pytest.raises(ValueError, match="must be 32"):
        budget(_streamed(), 0.25)


def test_pieces_cover_the_row_and_meet_at_the_cuts() -> None:
    assert _streamed(70).spans() == [(0, 16), (16, 32), (32, 48), (48, 64), (64, 70)]
    assert Task("cut", "", 80, 64, 16, 64, 8).spans() == [(0, 64), (64, 80)]


def _prepared(task: Task, weights: torch.Tensor, vocab: int = 5) -> Prepared:
    rng = np.random.default_rng(0)
    rows = len(weights)
    kv_heads = 1
    return Prepared(
        task,
        Path(),
        rng.integers(vocab, size=(rows, task.length)),
        rng.normal(size=(rows, task.length - 1 - task.measured, vocab)).astype(np.float32),
        np.stack([w[:, :, list(task.asked)].permute(2, 0, 1, 3).numpy() for w in weights]),
        np.stack([mass(w, kv_heads, task.cuts) for w in weights]),
    )


def _weights(rows: int, layers: int, heads: int, length: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(0)
    scores = torch.randn((rows, layers, heads, length, length), generator=rng)
    return scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf).softmax(-1)


@pytest.mark.parametrize(("cut", "horizon"), [(0, 16), (1, 32), (2, 256)])
def test_the_future_is_the_attention_that_the_next_queries_give(cut: int, horizon: int) -> None:
    task, weights = _streamed(), _weights(2, 2, 3, 64)
    at = task.cuts[cut]
    expected = weights[:, :, :, at : at + horizon].sum((2, 3))
    found = _prepared(task, weights).future(cut, horizon)
    np.testing.assert_allclose(found[:, :, 0], expected.numpy(), rtol=1e-4, atol=1e-5)


def test_the_meter_asks_for_every_position_and_weighs_bytes_by_tokens() -> None:
    task, weights = _streamed(), _weights(1, 2, 2, 64)
    prepared = _prepared(task, weights)
    meter = Meter(prepared, slice(0, 1))
    with pytest.raises(ValueError, match="not shown"):
        meter.outcome(0.0)
    for first, end in task.spans():
        meter.held(first, end, float(end), side=1.0)
        begin = max(first, task.measured)
        if begin < end:
            here = slice(begin - task.measured, min(end, task.length - 1) - task.measured)
            meter.logits(begin, prepared.logits[:, here])
        meter.kept(first, end, np.broadcast_to(np.arange(end), (1, 2, 1, end)))
    found = meter.outcome(1.0)
    np.testing.assert_allclose(found.kl, 0.0, atol=1e-12)
    np.testing.assert_allclose(found.mass, 1.0, atol=1e-5)
    assert (found.mean_bytes, found.peak_bytes, found.side_bytes) == (56.0, 64.0, 1.0)


def test_what_was_not_yet_computed_is_not_attended_to() -> None:
    task, weights = _streamed(), _weights(1, 1, 1, 64)
    meter = Meter(_prepared(task, weights), slice(0, 1))
    meter.kept(32, 64, np.arange(16, 64).reshape(1, 1, 1, -1))
    shown = meter._mass[0, :, 0, 0]
    expected = [weights[0, 0, 0, at, 16 : at + 1].sum() for at in task.asked]
    np.testing.assert_allclose(shown, expected, rtol=1e-5)


def _outcome(nll: list[float], peak: float = 100.0) -> Outcome:
    each = np.array(nll)[:, None]
    full = np.ones((len(nll), 1, 1, 1))
    return Outcome(each, each, each < 1, full, 100.0, peak, 0.0, 1.0)


def test_a_lead_is_paired_and_methods_above_the_budget_are_no_baselines() -> None:
    cell = Cell(
        "text", Budget(0.5, 32, 16), 100.0,
        {
            "kvpress: full": _outcome([0.0, 1.0, 2.0], 200.0),
            "kvpress: knorm": _outcome([1.0, 2.0, 3.0]),
            "kvpress: expected /4": _outcome([0.1, 1.1, 2.1], 120.0),
            "pigou: pigou": _outcome([0.5, 1.5, 2.5]),
            "pigou: oracle": _outcome([0.0, 1.0, 2.0]),
        },
        {},
    )  # fmt: skip
    assert above(cell) == ["kvpress: full", "kvpress: expected /4"]
    assert baselines(cell) == ["kvpress: knorm"]
    assert difference(cell, NLL, "pigou: pigou", "kvpress: knorm") == (0.5, 0.5, 0.5)
    assert closed(cell, KL) == pytest.approx(0.5)
