"""What is known of entries is what plain attention gives them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from checkpoints import BUNDLED
from masked import Bench, attend_in_full, bench, random_tokens
from torch import Tensor

from pigou.runtime.models.load import LoadedModel
from pigou.runtime.thread_pool import always_parallel

Find = Callable[[str], LoadedModel]
PATHS = pytest.mark.parametrize("plain", [False, True], ids=["kernels", "torch"])


def field(b: Bench, row: int, name: str) -> Tensor:
    """A field in the order of positions, shape (layers, kv_heads, entries)."""
    data = b.evictor.stats.collect(b.tables[row], b.entries[row])
    order = np.argsort(data[:, :, 0].view(np.int32), axis=-1)
    values = data[:, :, 1 + b.evictor.policy.fields.index(name)]
    return torch.from_numpy(np.take_along_axis(values, order, axis=-1))


def mass(model: LoadedModel, tokens: list[int], start: int, stop: int) -> Tensor:
    """What the queries of positions start to stop give each token: (layers, kv_heads, n)."""
    _, chances = attend_in_full(model, tokens)
    some = torch.stack([layer[:, start:stop] for layer in chances])
    return some.unflatten(1, (model.config.kv_heads, -1)).sum((2, 3))


@PATHS
@pytest.mark.parametrize("family", ["qwen3", BUNDLED])
def test_h2o_adds_up_the_attention_of_all_queries(family: str, plain: bool, loaded: Find) -> None:
    model = loaded(family)
    b = bench(model, "h2o", plain=plain)
    tokens = random_tokens(130)
    b.start(0, tokens)
    b.start(1, random_tokens(60, seed=2))
    for spans in ([(0, 70), (1, 33)], [(0, 30), (1, 1)], [(0, 1), (1, 1)], [(1, 5), (0, 1)]):
        b.run(spans)
    assert torch.allclose(
        field(b, 0, "mass"), mass(model, tokens[:102], 0, 102), atol=1e-5, rtol=1e-5
    )
    other = b.tokens[1][:40]
    assert torch.allclose(field(b, 1, "mass"), mass(model, other, 0, 40), atol=1e-5, rtol=1e-5)


@PATHS
@pytest.mark.parametrize("cut", [100, 90, 37])
def test_snapkv_has_the_last_queries_of_the_prompt(cut: int, plain: bool, loaded: Find) -> None:
    model = loaded("qwen3")
    b = bench(model, "snapkv", plain=plain, params={"window": 32, "pool": 5})
    tokens = random_tokens(100)
    b.start(2, tokens)
    b.run([(2, cut)])
    if cut < 100:
        b.run([(2, 100 - cut)])
    assert b.evictor.watch.since(2, 100) == 32
    expected = mass(model, tokens, 68, 100)
    assert torch.allclose(field(b, 2, "mass"), expected, atol=1e-5, rtol=1e-5)


@PATHS
def test_snapkv_s_windows_follow_one_another(plain: bool, loaded: Find) -> None:
    model = loaded("llama")
    b = bench(model, "snapkv", plain=plain, params={"window": 16, "pool": 1})
    tokens = random_tokens(90)
    b.start(0, tokens, prompt=50)
    b.run([(0, 50)])
    for _ in range(20):
        b.run([(0, 1)])
    assert b.evictor.watch.since(0, 70) == 4
    before, last = mass(model, tokens[:70], 50, 66), mass(model, tokens[:70], 66, 70)
    assert torch.allclose(field(b, 0, "before"), before, atol=1e-5, rtol=1e-5)
    assert torch.allclose(field(b, 0, "mass"), last, atol=1e-5, rtol=1e-5)
    result = b.run([(0, 1)], to_score=np.array([[0, 0, 2]], dtype=np.int32))
    assert len(result.lost_returns[0]) == 2


@PATHS
def test_attention_counts_from_a_row_s_own_first_entry_on(plain: bool, loaded: Find) -> None:
    model = loaded("llama")
    b = bench(model, "h2o", plain=plain)
    tokens = random_tokens(80)
    b.start(0, tokens)
    b.run([(0, 60)])
    before = field(b, 0, "mass").clone()
    b.tables[1, :3] = b.tables[0, :3]
    b.start(1, tokens, cached=48)
    b.run([(1, 20)])
    b.run([(1, 1)])
    assert torch.equal(field(b, 0, "mass"), before)
    own = mass(model, tokens[:69], 48, 69)[..., 48:]
    assert torch.allclose(field(b, 1, "mass")[..., 48:], own, atol=1e-5, rtol=1e-5)


@PATHS
def test_scores_move_with_their_tokens(plain: bool, loaded: Find) -> None:
    b = bench(loaded("qwen3"), "h2o", plain=plain)
    b.start(0, random_tokens(100))
    b.run([(0, 96)])
    data = b.evictor.stats.collect(b.tables[0], 96)
    known = {
        (layer, head, int(p)): m
        for layer, head in np.ndindex(*data.shape[:2])
        for p, m in zip(data[layer, head, 0].view(np.int32), data[layer, head, 1], strict=True)
    }
    b.run([], compactions=[b.compaction(0, 48)])
    left = b.evictor.stats.collect(b.tables[0], 48)
    for layer, head in np.ndindex(*left.shape[:2]):
        positions = left[layer, head, 0].view(np.int32)
        assert [known[layer, head, int(p)] for p in positions] == left[layer, head, 1].tolist()
        gone = [known[layer, head, p] for p in range(2, 88) if p not in positions]
        kept = [known[layer, head, int(p)] for p in positions if 2 <= p < 88]
        assert max(gone) <= min(kept)


def test_mass_is_the_same_on_several_threads(loaded: Find, monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded("qwen3")
    found = []
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda n=threads: n)
        with always_parallel():
            b = bench(model, "snapkv")
            for row in range(3):
                b.start(row, random_tokens(90, seed=row))
            b.run([(0, 70), (1, 41), (2, 1)])
            b.run([(0, 1), (1, 30), (2, 1)])
        found.append([field(b, row, name) for row in range(3) for name in ("mass", "before")])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_an_entry_is_used_when_it_gets_more_than_its_share(loaded: Find) -> None:
    model = loaded("llama")
    b = bench(model, "lru", params={"notable": 1.0, "interval": 8})
    tokens = random_tokens(90)
    b.start(0, tokens, prompt=64)
    b.run([(0, 64)])
    for _ in range(9):
        b.run([(0, 1)])
    clock = b.evictor.watch.clock
    share = mass(model, tokens[:72], 64, 72)
    group = model.config.group
    notable = share[..., :72] >= 8 * group / 72
    used = field(b, 0, "used")[..., :72]
    assert torch.equal(used[..., :64] == clock, notable[..., :64])
