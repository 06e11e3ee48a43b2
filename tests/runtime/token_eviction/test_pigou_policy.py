"""Laws of the policies that go by a trained predictor."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from pigou.config import ConfigError, EvictionConfig
from pigou.models import bundled_path
from pigou.runtime.models.model_config import parse_config
from pigou.runtime.models.rotary_embedding import rotary_table, rotate
from pigou.runtime.token_eviction.pigou_policy import Paper, PaperLossy, Pigou
from pigou.runtime.token_eviction.policy import CacheEntries, EvictionContext, TokenPolicy, make
from pigou.runtime.token_eviction.predictor import (
    PAPER,
    SCALES,
    GenericReturns,
    PaperModel,
    ReturnModel,
    unrotate,
)

FOLDER = bundled_path()
CONFIG = parse_config(json.loads((FOLDER / "config.json").read_text()))
LAYERS, HEADS, WIDTH = CONFIG.layers, CONFIG.kv_heads, CONFIG.head_dim
COUNT = 12


def setting(folder: Path = FOLDER, **params: float) -> EvictionContext:
    turns = rotary_table(CONFIG.rope, 2048, torch.device("cpu"))
    return EvictionContext(EvictionConfig(params=params), CONFIG, folder, turns)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def papers(tmp_path: Path) -> Path:
    """Return a folder with weights for the paper's predictor."""
    into = normal(CONFIG.vocab, 256) / 50
    PaperModel(into, normal(256), normal(256, 2) / 50, normal(2)).save(tmp_path / PAPER)
    return tmp_path


def entries(policy: TokenPolicy, since: int = 7) -> CacheEntries:
    """Entries at positions 0, 3, 6, ..., whose fields are drawn."""
    data = normal(LAYERS, HEADS, 1 + len(policy.fields), COUNT).abs().numpy()
    data[:, :, 0] = np.arange(0, 3 * COUNT, 3, dtype=np.int32).view(np.float32)
    return CacheEntries(data, policy.fields, 100, since, 0, "request")


def test_a_score_is_the_power_mean_of_a_log_normal_return_by_the_faded_sums() -> None:
    policy = make(Pigou, setting(order=1.5))
    seen = entries(policy)
    fields = {name: torch.from_numpy(seen.field(name)) for name in policy.fields}
    sums = [fields[name] for name in ("mass_all", "mass_slow", "mass_fast")]
    faded = [s * np.exp(-7 / scale) + fields["mass"] for s, scale in zip(sums, SCALES, strict=True)]
    content = torch.stack((fields["content_0"], fields["content_1"]), dim=-1)
    age = (100 - 3 * torch.arange(COUNT)).float().expand(LAYERS, HEADS, COUNT)
    mean, sigma = policy.model.value(content, torch.stack(faded, dim=-1), age)
    np.testing.assert_allclose(policy.score(seen), torch.exp(mean + 0.75 * sigma**2), rtol=1e-4)


@pytest.mark.parametrize("trained", [True, False])
def test_rows_are_scored_together_as_each_alone(trained: bool, tmp_path: Path) -> None:
    policy = make(Pigou, setting(FOLDER if trained else tmp_path))
    rows = [entries(policy, since) for since in (0, 7, 31)]
    short = CacheEntries(rows[0].data[..., :5].copy(), policy.fields, 40, 3, 0, "short")
    rows.insert(1, short)
    for found, row in zip(policy.scores(rows), rows, strict=True):
        np.testing.assert_allclose(found, policy.score(row), rtol=1e-5)


def test_doubt_speaks_for_keeping_entries_the_more_the_higher_the_order() -> None:
    shy, bold = (make(Pigou, setting(order=order)) for order in (0.0, 1.0))
    assert (bold.score(entries(bold)) > shy.score(entries(shy))).all()


def test_the_order_is_2_in_the_first_half_of_the_layers_and_3_in_the_rest(tmp_path: Path) -> None:
    """It is 0.75 in all, where the predictor is the generic one."""
    half = LAYERS // 2
    for folder, first, rest in ((FOLDER, 2.0, 3.0), (tmp_path, 0.75, 0.75)):
        default, low, high = (
            make(Pigou, setting(folder, **params))
            for params in ({}, {"order": first}, {"order": rest})
        )
        found = default.score(entries(default))
        np.testing.assert_array_equal(found[:half], low.score(entries(low))[:half])
        np.testing.assert_array_equal(found[half:], high.score(entries(high))[half:])


def test_a_score_is_finite_however_large_the_doubt() -> None:
    policy, bold = make(Pigou, setting()), make(Pigou, setting(order=6.0))
    assert isinstance(policy.model, ReturnModel)
    for each in (policy, bold):
        each.model.value_last[:, 0, 1] = 40.0
        found = each.score(entries(each))
        assert np.isfinite(found).all()
    policy.model.value_last[:, 0, 0] = np.nan
    assert np.isnan(policy.score(entries(policy))).all()


@pytest.mark.parametrize("order", [7.0, -6.5, float("nan")])
def test_an_order_whose_power_means_no_float_holds_is_refused(order: float) -> None:
    with pytest.raises(ConfigError, match=r"order is .*from -6 to 6"):
        make(Pigou, setting(order=order))


def test_an_entry_without_content_is_still_judged() -> None:
    policy = make(Pigou, setting())
    seen = entries(policy)
    seen.field("content_0")[..., -1] = np.nan
    seen.field("content_1")[..., -1] = np.nan
    assert np.isfinite(policy.score(seen)).all()


def test_content_is_that_of_keys_without_their_rotation() -> None:
    policy = make(Pigou, setting())
    assert isinstance(policy.model, ReturnModel)
    keys, values = normal(LAYERS, HEADS, COUNT, WIDTH), normal(LAYERS, HEADS, COUNT, WIDTH)
    positions = np.arange(50, 50 + COUNT, dtype=np.int32)
    turns = policy.setting.turns[50 : 50 + COUNT]
    torch.testing.assert_close(
        policy.birth(rotate(keys, turns), values, positions),
        policy.model.birth(keys, values),
        rtol=1e-3,
        atol=1e-3,
    )
    torch.testing.assert_close(unrotate(rotate(keys, turns), turns), keys, rtol=1e-4, atol=1e-4)


def test_a_model_without_weights_has_the_generic_predictor(tmp_path: Path) -> None:
    policy = make(Pigou, setting(tmp_path))
    assert isinstance(policy.model, GenericReturns)
    keys, values = normal(LAYERS, HEADS, COUNT, WIDTH), normal(LAYERS, HEADS, COUNT, WIDTH)
    content = policy.birth(keys, values, np.arange(COUNT, dtype=np.int32))
    assert content.shape == (LAYERS, HEADS, COUNT, 2)
    score = policy.score(entries(policy))
    assert score.shape == (LAYERS, HEADS, COUNT)
    assert np.isfinite(score).all()


def test_the_papers_policy_subtracts_lambda_times_the_variance_of_whole_tokens(
    papers: Path,
) -> None:
    policy = make(PaperLossy, setting(papers, **{"lambda": 0.3}))
    logits = normal(COUNT, CONFIG.vocab)
    mean, variance = PaperModel.load(papers / PAPER).birth(logits)
    seen = entries(policy)
    seen.data[:, :, 1:] = policy.from_logits(logits).T.numpy()
    np.testing.assert_allclose(policy.score(seen), mean - 0.3 * variance, rtol=1e-4, atol=1e-6)
    assert policy.score(seen).shape == (COUNT,)


def test_computing_again_costs_the_papers_delta(papers: Path) -> None:
    assert make(Paper, setting(papers, delta=0.25)).penalty == 0.25
    with pytest.raises(ConfigError, match="delta"):
        make(Paper, setting(papers, delta=-1.0))


def test_only_the_lossy_paper_never_revives() -> None:
    assert Paper.recomputes
    assert not PaperLossy.recomputes


def test_the_paper_refuses_a_model_that_nobody_trained_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="writes it"):
        make(Paper, setting(tmp_path))


def test_the_paper_refuses_weights_of_another_vocabulary(papers: Path) -> None:
    paper = PaperModel.load(papers / PAPER)
    PaperModel(paper.into[:100], paper.bias, paper.out, paper.last).save(papers / PAPER)
    with pytest.raises(ConfigError, match="100"):
        make(Paper, setting(papers))
