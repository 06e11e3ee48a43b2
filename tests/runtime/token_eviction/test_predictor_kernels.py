"""Kernels that judge entries where they lie find what the networks say of copies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from checkpoints import BUNDLED
from masked import SIZE, Bench, bench, random_tokens

from pigou.models import bundled_path
from pigou.runtime.models.load import LoadedModel, load
from pigou.runtime.simd import exponential, logarithm

Find = Callable[[str], LoadedModel]
RECENT = 8  # as `bench` has it


def test_logarithm_is_exact_to_a_few_units_in_the_last_place() -> None:
    x = np.concatenate((np.geomspace(1e-37, 1e37, 4000), np.linspace(0.5, 2.0, 4000)))
    x = x.astype(np.float32)
    ours, exact = np.array([logarithm(each) for each in x]), np.log(x.astype(np.float64))
    np.testing.assert_allclose(ours, exact, rtol=3e-7, atol=1e-7)
    assert exponential(logarithm(np.float32(7.0))) == pytest.approx(7.0, rel=1e-6)


def predicted(b: Bench, drops: list[int]) -> list[np.ndarray]:
    """Appraise a row before each of these compactions; return its losses."""
    b.start(0, random_tokens(190), prompt=70)
    b.run([(0, 103)])
    found = []
    for drop in drops:
        most = (b.entries[0] - 20) // SIZE
        result = b.run([(0, 1)], to_score=np.array([[0, 5, most]], dtype=np.int32))
        found.append(result.lost_returns[0])
        b.run([(0, 21)], compactions=[b.compaction(0, drop, first=5)])
    return found


@pytest.mark.parametrize(
    "kv_dtype",
    ["auto", "int8_per_token_head", pytest.param("fp8_e4m3", marks=pytest.mark.slow)],
)
def test_kernels_and_networks_lose_the_same_and_keep_the_same(kv_dtype: str, loaded: Find) -> None:
    model = replace(loaded(BUNDLED), kv_dtype=kv_dtype)
    both = [bench(model, "pigou", plain=plain) for plain in (False, True)]
    ours, theirs = (predicted(b, [32, 16, 32]) for b in both)
    for mine, other in zip(ours, theirs, strict=True):
        assert len(mine) > 2
        np.testing.assert_allclose(mine, other, rtol=1e-3)
    heads = zip(*((head for layer in b.kept(0) for head in layer) for b in both), strict=True)
    for mine, other in heads:  # of two that are worth nearly the same, either may have gone
        assert len(mine & other) >= len(other) - 1


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_what_may_go_is_summed_up_and_of_the_recent_whole_blocks_alone(dtype: str) -> None:
    b = bench(load(bundled_path(), dtype), "pigou")
    policy, cache = b.evictor.policy, b.executor.cache
    predicted(b, [32, 32])  # in each head, other entries lie in a slot now
    b.run([(0, 1)], to_score=np.array([[0, 0, 2]], dtype=np.int32))
    end = b.computed[0]
    data = b.evictor.stats.collect(b.tables[0], b.entries[0])
    positions, content = data.view(np.int32)[:, :, 0], data[:, :, -2:].swapaxes(2, 3)
    slots = np.arange(b.entries[0])
    old = positions < end - RECENT
    assert not np.isnan(content[old]).any()
    whole = slots < b.entries[0] // SIZE * SIZE
    assert not np.isnan(content[..., whole, :]).any()
    assert np.isnan(content[..., -1, :]).all()
    blocks = b.tables[0].astype(np.int64)
    for layer, head in np.ndindex(positions.shape[:2]):
        keys = cache.keys(layer)[blocks, head].swapaxes(1, 2).flatten(0, 1)[slots]
        values = cache.values(layer)[blocks, head].flatten(0, 1)[slots]
        shape = (*positions.shape[:2], len(slots), -1)
        keys, values = (part.float().expand(shape) for part in (keys, values))
        found = policy.birth(keys, values, positions[layer, head])[layer, head].numpy()
        some = old[layer, head]
        np.testing.assert_allclose(content[layer, head][some], found[some], rtol=1e-3, atol=1e-3)


def test_returns_are_finite_however_large_the_doubt(loaded: Find) -> None:
    b = bench(loaded(BUNDLED), "pigou")
    b.evictor.policy.model.value_last[:, 0, 1] = 40.0  # type: ignore[attr-defined]
    assert all(np.isfinite(losses).all() for losses in predicted(b, [16]))


def test_weights_without_meaning_are_told(loaded: Find) -> None:
    b = bench(loaded(BUNDLED), "pigou")
    model = b.evictor.policy.model  # type: ignore[attr-defined]
    torch.nn.init.constant_(model.value_last, torch.nan)
    with pytest.raises(ValueError, match="not finite"):
        predicted(b, [16])
