"""Tokens come back as if they had never gone, and generated ones can be undone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from masked import SIZE, Bench, attend_in_full, bench, near, random_tokens
from torch import Tensor

from pigou.engine.plan import Recomputation
from pigou.runtime.models import load as loading
from pigou.runtime.models.load import LoadedModel
from pigou.runtime.token_eviction.policy import CacheEntries, Returns, TokenPolicy

Find = Callable[[str], LoadedModel]


class Spoken(TokenPolicy):
    """Whole tokens, by a number that their logits yield."""

    fields = ("said",)
    logit_fields = ("said",)
    recomputes = True

    def score(self, entries: CacheEntries) -> Returns:
        return entries.field("said")[0, 0]

    def from_logits(self, logits: Tensor) -> Tensor:
        return logits[:, :1].sin()


@pytest.fixture
def spoken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        loading, "load_policy", lambda _name, setting: Spoken(setting, Spoken.Params())
    )


def revival(b: Bench, row: int, count: int) -> Recomputation:
    entries = b.entries[row]
    b.entries[row] += count
    return Recomputation(row, entries, count, b.tables[row, : -(-b.entries[row] // SIZE)].copy())


@pytest.mark.usefixtures("spoken")
@pytest.mark.parametrize("plain", [False, True], ids=["kernels", "torch"])
def test_all_that_was_given_up_comes_back(plain: bool, loaded: Find) -> None:
    model = loaded("qwen3")
    b = bench(model, plain=plain)
    for row in (0, 1):
        b.start(row, random_tokens(120, seed=row))
    b.run([(0, 100), (1, 80)])
    b.run([(0, 1)], compactions=[b.compaction(0, 48), b.compaction(1, 32)])
    b.run([(1, 1)], recomputations=[revival(b, 1, 32), revival(b, 0, 47)])
    full, _ = attend_in_full(model, b.tokens[1][:81])
    assert near(b.logits[1], full[-1])
    b.run([(0, 1)], recomputations=[revival(b, 0, 1)])
    assert b.kept(0)[0][0] == set(range(102))
    full, _ = attend_in_full(model, b.tokens[0][:100])
    said = b.evictor.stats.collect(b.tables[0], b.entries[0])[0, 0]
    order = np.argsort(said[0].view(np.int32))[:100]
    assert torch.allclose(torch.from_numpy(said[1][order]), full[:, 0].sin(), atol=1e-4)


@pytest.mark.usefixtures("spoken")
def test_a_token_comes_back_as_those_before_it_make_it(loaded: Find) -> None:
    model = loaded("llama")
    b = bench(model)
    b.start(0, random_tokens(120))
    b.run([(0, 100)])
    b.run([], compactions=[b.compaction(0, 48)])
    before = b.kept(0)[0][0]
    b.run([], recomputations=[revival(b, 0, 5)])
    after = b.kept(0)[0][0]
    assert len(after) == 57
    # The worth of what came back is at least that of what is still away.
    logits, _ = attend_in_full(model, b.tokens[0][:100])
    said = logits[:, 0].sin()
    away = set(range(2, 92)) - after
    assert min(said[t] for t in after - before) >= max(said[t] for t in away)
    b.run([(0, 1)])
    assert torch.isfinite(b.logits[0]).all()


@pytest.mark.usefixtures("spoken")
def test_gains_are_what_was_given_up_with_blocks_of_tokens(loaded: Find) -> None:
    b = bench(loaded("llama"))
    b.start(0, random_tokens(120))
    b.run([(0, 100)])
    ask = np.array([[0, 0, 4]], dtype=np.int32)
    losses = b.run([(0, 1)], to_score=ask).lost_returns[0]
    assert len(losses) == 4
    assert (np.diff(losses) >= 0).all()
    gains = b.run([(0, 1)], to_score=ask, compactions=[b.compaction(0, 48)]).regained_returns[0]
    assert np.allclose(gains, losses[2::-1], rtol=1e-5)
    with pytest.raises(ValueError, match="49 tokens are to come back; 48 were given up"):
        b.run([], recomputations=[revival(b, 0, 49)])


@pytest.mark.parametrize("policy", ["h2o", "fifo"])
def test_tokens_are_undone_with_their_entries(policy: str, loaded: Find) -> None:
    model = loaded("qwen3")
    b = bench(model, policy)
    tokens = random_tokens(90)
    b.start(0, tokens, prompt=60)
    b.run([(0, 60)])
    b.run([(0, 1)], compactions=[b.compaction(0, 16)])
    kept = [[head - {60} for head in layer] for layer in b.kept(0)]
    b.run([(0, 12)])
    b.executor._sequences["r0"].length = 74
    b.executor.truncate("r0", 9)
    b.computed[0] -= 9
    b.entries[0] -= 9
    assert len(b.executor.tokens("r0")) == 65
    b.tokens[0] = tokens[:64] + random_tokens(20, seed=8)
    b.executor._sequences["r0"].buffer[:84] = b.tokens[0]
    b.run([(0, 6)])
    logits, _ = attend_in_full(model, b.tokens[0][:70], {60: kept})
    assert near(b.logits[0], logits[-1])


def test_what_was_moved_since_cannot_be_undone(loaded: Find) -> None:
    b = bench(loaded("llama"), recent=4)
    b.start(0, random_tokens(90), prompt=40)
    b.run([(0, 60)])
    b.run([], compactions=[b.compaction(0, 32)])
    with pytest.raises(ValueError, match="not its last entries"):
        b.executor.truncate("r0", 12)
    with pytest.raises(ValueError, match="generated 50 tokens"):
        b.executor.truncate("r0", 51)
