"""Laws of what predicts the worth of cache entries."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pigou.models import bundled_path
from pigou.runtime.models.rotary_embedding import Rope, rotary_table, rotate
from pigou.runtime.token_eviction.predictor import (
    CONTENT,
    FOLD,
    RETURNS,
    SCALES,
    PaperModel,
    ReturnModel,
    unrotate,
)

sys.path.append(str(Path(__file__).parents[3] / "tools"))

from returns.change import discounted, drop_changes, output_grams
from returns.cut import gains
from returns.examples import PIECE, fades

LAYERS, HEADS, WIDTH = 4, 2, 64


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def model() -> ReturnModel:
    return ReturnModel.load(bundled_path() / RETURNS)


@given(st.integers(1, 20), st.floats(0.5, 1.5), st.integers(0, 2000))
def test_unrotating_undoes_rotating(count: int, amplitude: float, first: int) -> None:
    frequencies = (10_000.0 ** -(torch.arange(0, WIDTH, 2) / WIDTH)).numpy()
    table = rotary_table(Rope(frequencies, amplitude), 2048, torch.device("cpu"))
    turns, keys = table[first : first + count], normal(count, HEADS, WIDTH)
    turned = rotate(keys, turns.unsqueeze(1))
    back = unrotate(turned.transpose(0, 1), turns).transpose(0, 1)
    torch.testing.assert_close(back, keys * amplitude, rtol=1e-4, atol=1e-4)


def test_an_entry_is_judged_by_itself_alone(model: ReturnModel) -> None:
    keys, values = normal(LAYERS, HEADS, 9, WIDTH), normal(LAYERS, HEADS, 9, WIDTH, seed=1)
    masses, age = normal(LAYERS, HEADS, 9, len(SCALES)).abs(), torch.arange(1.0, 10.0)
    content = model.birth(keys, values)
    assert content.shape == (LAYERS, HEADS, 9, CONTENT)
    mean, sigma = model.value(content, masses, age.expand(LAYERS, HEADS, 9))
    order = torch.tensor([4, 0, 7])
    alone = model.birth(keys[:, :, order], values[:, :, order])
    torch.testing.assert_close(alone, content[:, :, order])
    some = model.value(alone, masses[:, :, order], age[order].expand(LAYERS, HEADS, 3))
    torch.testing.assert_close(some[0], mean[:, :, order])
    torch.testing.assert_close(some[1], sigma[:, :, order])


def test_what_never_was_attended_to_is_judged_finitely(model: ReturnModel) -> None:
    zero = torch.zeros(LAYERS, HEADS, 3, WIDTH)
    content = model.birth(zero, zero)
    masses, age = torch.zeros(LAYERS, HEADS, 3, len(SCALES)), torch.ones(LAYERS, HEADS, 3)
    mean, sigma = model.value(content, masses, age)
    assert mean.isfinite().all()
    assert (sigma > 0).all()


def test_weights_survive_being_written(model: ReturnModel, tmp_path: Path) -> None:
    model.save(tmp_path / "weights.npz")
    again = ReturnModel.load(tmp_path / "weights.npz")
    torch.testing.assert_close(again.birth_in, model.birth_in, rtol=0, atol=0)
    torch.testing.assert_close(again.value_last, model.value_last, rtol=0, atol=0)


def test_the_papers_return_is_a_fraction_and_its_variance_positive() -> None:
    paper = PaperModel(normal(99, 256), normal(256), normal(256, 2), normal(2))
    mean, variance = paper.birth(10 * normal(50, 99))
    assert ((mean >= 0) & (mean <= 1)).all()
    assert (variance > 0).all()


@given(st.integers(2, 8), st.integers(0, 1000))
def test_the_closed_form_is_the_change_when_an_entry_is_masked(entries: int, seed: int) -> None:
    group, width, hidden, queries = 2, 4, 8, 3
    weight = normal(hidden, group * width, seed=seed)
    scores, values = normal(1, 1, group, queries, entries, seed=seed + 1), normal(1, 1, entries, 4)
    probs = scores.softmax(-1)
    outputs = probs @ values.unsqueeze(2)
    changes = drop_changes(probs, outputs, values, output_grams(weight, 1, group))
    parts = weight.view(hidden, group, width)
    for entry in range(entries):
        masked = scores.clone()
        masked[..., entry] = float("-inf")
        moved = masked.softmax(-1) @ values.unsqueeze(2) - outputs
        norms = torch.einsum("bhgqd,ngd->bhgqn", moved, parts).norm(dim=-1).sum(2)
        torch.testing.assert_close(changes[..., entry], norms, rtol=2e-2, atol=2e-4)


def test_a_constant_change_is_worth_the_horizon_wherever_the_sequence_ends() -> None:
    changes = torch.full((2, 100, 5), 0.25)
    worth = discounted(changes, torch.tensor([10, 50, 99]), horizon=40.0)
    torch.testing.assert_close(worth, torch.full((2, 3, 5), 10.0))


@given(st.integers(0, 100))
def test_a_gain_at_a_cut_is_the_difference_of_the_layers_squared_errors(seed: int) -> None:
    heads, queries, entries, width = 2, 3, 7, 4
    probs = normal(heads, 1, queries, entries, seed=seed).softmax(-1)
    values, weight = normal(heads, entries, width, seed=seed + 1), normal(5, heads * width)
    kept = normal(heads, entries - 1, seed=seed + 2) > 0
    kept[:, 0] = True
    chosen = torch.arange(1, entries - 1)
    full = probs @ values[:, None]

    def errors(mask: Tensor) -> Tensor:
        cached = probs * torch.cat((mask, torch.ones(heads, 1)), 1)[:, None, None]
        out = cached @ values[:, None] / cached.sum(-1, keepdim=True)
        wrong = (out - full).permute(2, 0, 1, 3).reshape(queries, -1) @ weight.T
        return wrong.square().sum(-1)

    gain, _ = gains(probs, full, values, kept, chosen, weight)
    for head in range(heads):
        for index, entry in enumerate(chosen.tolist()):
            there, gone = kept.clone(), kept.clone()
            there[head, entry], gone[head, entry] = True, False
            expect = errors(gone) - errors(there)
            torch.testing.assert_close(gain[head, :, index], expect, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("pieces", range(1, 9))
def test_attention_counts_by_a_time_as_much_as_after_the_runtimes_folds(pieces: int) -> None:
    scales, mass, since = torch.tensor(SCALES), torch.zeros(1, pieces), 0
    older = torch.zeros(len(SCALES), pieces)
    for piece in range(pieces):
        if since == FOLD:
            older, mass, since = older * torch.exp(-FOLD / scales)[:, None] + mass, 0 * mass, 0
        mass[0, piece] += 1
        since += PIECE
    expect = older * torch.exp(-since / scales)[:, None] + mass
    torch.testing.assert_close(fades(PIECE * pieces), expect)
