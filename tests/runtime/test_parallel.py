"""Ranks: a worker's processes compute what one process does."""

from __future__ import annotations

import queue
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import VOCAB, make_config, shapes, write_checkpoint
from tests.lib.ranks import run_ranks

from pigou.config import EngineConfig, SpeculativeConfig
from pigou.engine.plan import Rates
from pigou.models import ModelError
from pigou.request import SamplingParams
from pigou.runtime.local_engine import LocalEngine
from pigou.runtime.models.load import LoadedModel, load
from pigou.runtime.models.model_config import parse_config
from pigou.runtime.parallel import Group, RankError, Shard
from pigou.runtime.ranks import Ranks
from pigou.runtime.speculation import NgramProposer
from reference import make_prompts


def _collectives(group: Group) -> dict[str, Any]:
    own = torch.full((2, 3), float(group.rank + 1))
    rows = torch.arange(group.size * 2.0).view(-1, 1) + 100 * group.rank
    sent = [2] * group.size
    return {
        "reduced": group.all_reduce(own.clone()).tolist(),
        "gathered": group.all_gather(own)[:, 0, 0].tolist(),
        "exchanged": group.all_to_all_single(rows, sent, sent)[:, 0].tolist(),
        "uneven": group.all_to_all_single(
            own.new_full((group.rank,), group.rank), [group.rank, *[0] * (group.size - 1)],
            list(range(group.size)) if group.rank == 0 else [0] * group.size,
        ).tolist(),
        "told": group.broadcast(own.clone(), 1)[0, 0].item(),
        "narrow": group.all_reduce(own.bfloat16()).tolist(),
    }  # fmt: skip


@pytest.mark.parametrize("size", [2, 4])
def test_collectives_do_what_torch_says(size: int) -> None:
    results = run_ranks(size, _collectives)
    total = size * (size + 1) / 2
    for rank, result in enumerate(results):
        assert result["reduced"] == result["narrow"] == [[total] * 3] * 2
        assert result["gathered"] == [1.0 + r for r in range(size)]
        assert result["exchanged"] == [
            100.0 * source + 2 * rank + i for source in range(size) for i in range(2)
        ]
        assert result["told"] == 2.0
        assert result["uneven"] == ([float(r) for r in range(size) for _ in range(r)] if not rank
                                    else [])  # fmt: skip


NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=4, prompt_lookup_min=1)


def _engine(model: LoadedModel, **limits: Any) -> LocalEngine:
    plain: dict[str, Any] = {"blocks": 300, "max_model_len": 256, "max_batched_tokens": 48}
    proposer = NgramProposer(NGRAM) if "num_speculative_tokens" in limits else None
    engine = LocalEngine(model, EngineConfig(**{**plain, **limits}), proposer=proposer)
    if engine.core.drafts is not None:  # whatever they cost
        engine.core.drafts.choose = lambda _, offers: np.minimum(offers, 4)  # type: ignore[method-assign]
    return engine


GREEDY = SamplingParams(max_tokens=16, temperature=0.0, logprobs=5, prompt_logprobs=3)
#: Limits by which a prompt takes every path of the engine.
PATHS: dict[str, dict[str, Any]] = {
    "chunks": {"max_batched_tokens": 7, "max_seqs": 5},
    "recompute": {"blocks": 8},
    "swap": {"blocks": 8, "host_blocks": 64},
    "single steps": {"max_repeat": 1},
    "drafts": {"num_speculative_tokens": 4},
}


def test_a_rank_that_is_gone_ends_its_worker_by_name(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", make_config("llama"))
    ranks = Ranks(2, {"model": str(folder), "dtype": "fp32"})
    ended: queue.SimpleQueue[RankError] = queue.SimpleQueue()
    try:
        engine = _engine(ranks.load())
        ranks.watch(ended.put)
        engine.generate([[5, 6, 7]], GREEDY)
        ranks.processes[0].kill()
        assert "rank 1 (process" in str(ended.get(timeout=60))
        with pytest.raises(RankError, match="ended by signal 9"):
            engine.generate([[5, 6, 7]], GREEDY)
    finally:
        ranks.close()


@pytest.fixture(
    scope="module",
    params=[("llama", 2), ("qwen2", 4), pytest.param(("qwen3", 2), marks=pytest.mark.slow)],
)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LoadedModel, LoadedModel]]:
    """A model in one process, and the same over several; Qwen2's KV heads are fewer."""
    family, size = request.param
    biases = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    config = make_config(family, **biases)
    folder = write_checkpoint(tmp_path_factory.mktemp(family), config)
    ranks = Ranks(size, {"model": str(folder), "dtype": "fp32"})
    yield load(folder, "fp32"), ranks.load()
    ranks.close()
    assert all(process.poll() == 0 for process in ranks.processes)


def test_ranks_compute_what_one_process_does_on_every_path(
    pair: tuple[LoadedModel, LoadedModel],
) -> None:
    prompts = make_prompts(6, VOCAB, 60)
    alone = _engine(pair[0]).generate(prompts, GREEDY)
    plain = SamplingParams(max_tokens=24, temperature=0.0)
    long = _engine(pair[0]).generate(prompts, plain)
    for path, limits in PATHS.items():
        engine = _engine(pair[1], **limits)
        if path == "swap":
            engine.core.rates = Rates(prefill=1.0, swap=1e12, block_bytes=1)
        for again in range(2):
            outputs = engine.generate(prompts, plain)
            assert [o.tokens for o in outputs] == [o.tokens for o in long], path
            if "blocks" in limits:
                assert any(o.preemptions for o in outputs)
            elif again:
                assert any(o.cached for o in outputs)  # a prefix hit
        assert (engine.core.stats.swaps > 0) == (path == "swap")
        if path == "drafts":
            assert engine.core.drafts is not None
            assert engine.core.drafts.draft_tokens > 0
    shared = _engine(pair[1]).generate(prompts, GREEDY)
    assert [o.tokens for o in shared] == [o.tokens for o in alone]
    for ours, theirs in zip(shared, alone, strict=True):
        for a, b in zip(
            [*ours.prompt_logprobs[1:], *ours.logprobs],
            [*theirs.prompt_logprobs[1:], *theirs.logprobs],
            strict=True,
        ):
            assert a is not None
            assert b is not None
            assert a.logprob == pytest.approx(b.logprob, rel=1e-5, abs=1e-5)


def test_blocks_have_the_same_bytes_for_any_number_of_ranks(
    pair: tuple[LoadedModel, LoadedModel],
) -> None:
    prompt = make_prompts(1, VOCAB, 60, seed=3)[0]
    read = []
    for model in pair:
        engine = _engine(model)
        engine.generate([prompt], SamplingParams(max_tokens=1, temperature=0.0))
        blocks = np.arange(len(prompt) // 16, dtype=np.int32)
        read.append((engine.cache.layout.fingerprint(), engine.cache.read(blocks)))
    assert read[0][0] == read[1][0]
    np.testing.assert_allclose(read[0][1].view(np.float32), read[1][1].view(np.float32), atol=1e-5)


@pytest.mark.parametrize(
    ("size", "message"),
    [(3, "must divide the 4 attention heads"), (8, "must divide the 4 attention heads")],
)
def test_sizes_that_do_not_divide_the_heads_are_refused(size: int, message: str) -> None:
    config = parse_config(make_config("llama"))
    with pytest.raises(ModelError, match=message):
        Shard(config, 0, size)


def test_parts_of_the_ranks_cover_every_tensor_once(tmp_path: Path) -> None:
    source = make_config("qwen2")
    config = parse_config(source)
    for size in (1, 2, 4):
        shards = [Shard(config, rank, size) for rank in range(size)]
        for name, shape in shapes(source).items():
            parts = [part for shard in shards if (part := shard.part(name)) is not None]
            if not parts:
                continue
            assert sum(part.share for part in parts) in (1.0, len(parts))
            if parts[0].share != 1:
                continue
            cover = np.zeros(shape[parts[0].axis], dtype=int)
            for part in parts:
                assert part.whole == len(cover)
                cover[part.first : part.first + part.length] += 1
            copies = max(1, size // config.kv_heads) if re.search("[kv]_proj", name) else 1
            assert len(parts) == size
            assert cover.min() == cover.max() == copies
