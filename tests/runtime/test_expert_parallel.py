"""Expert parallelism over processes: equal answers, whatever the placement and the exchange."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import VOCAB
from hypothesis import given, settings
from hypothesis import strategies as st
from test_experts import make_experts, make_products
from tests.lib.examples import examples
from tests.lib.ranks import run_ranks

from pigou.config import NEVER, ConfigError, EngineConfig, EplbConfig
from pigou.models import ModelError
from pigou.request import SamplingParams
from pigou.runtime.local_engine import LocalEngine
from pigou.runtime.models import expert_parallel
from pigou.runtime.models.expert_parallel import (
    ExpertSlots,
    expert_loads,
    share_tokens,
)
from pigou.runtime.models.experts import ExpertLoads, LoopedProducts, Routing
from pigou.runtime.models.load import load
from pigou.runtime.parallel import Group
from pigou.worker.config import WorkerConfig
from reference import Prompt, Reference, make_prompts

FindFolder = Callable[[str], Path]
FindReference = Callable[[str], Reference]
FIXED = EplbConfig(step_interval=NEVER)


def _generate(group: Group, folder: Path, prompts: list[Prompt], config: EplbConfig) -> Any:
    """All ranks run the same engine in step, each on its part of the model."""
    model = load(folder, "fp32", group=group, expert_parallel=config)
    engine = LocalEngine(
        model, EngineConfig(blocks=200, max_model_len=128, max_batched_tokens=48, max_repeat=1)
    )
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    outputs = [output.tokens for output in engine.generate(prompts, params)]
    decoder: Any = model.decoder
    return outputs, decoder.loads.moved, decoder.loads.totals.tolist()


@pytest.mark.parametrize(
    ("family", "ranks", "config"),
    [
        ("mixtral", 2, FIXED),
        ("qwen2_moe", 2, EplbConfig(step_interval=NEVER, num_redundant_experts=2)),
        ("qwen3_moe", 4, FIXED),
        ("qwen3_moe", 2, EplbConfig(window_size=3, step_interval=5, num_redundant_experts=4)),
        ("mixtral", 2, EplbConfig(window_size=9, step_interval=4, num_redundant_experts=4)),
    ],
    ids=["mixtral-2", "copies-2", "qwen3-4", "moving-copies-2", "moving-mixtral-2"],
)
def test_greedy_tokens_are_those_of_one_process(
    family: str,
    ranks: int,
    config: EplbConfig,
    folder: FindFolder,
    reference: FindReference,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(expert_parallel, "_IMBALANCE", 0.01)  # ranks are forked
    monkeypatch.setattr(expert_parallel, "KNEE", 0.1)  # moves pay at once
    prompts = make_prompts(6, VOCAB, 60)
    results = run_ranks(ranks, _generate, folder(family), prompts, config)
    outputs, moved, loads = results[0]
    assert all(result == results[0] for result in results)
    reference(family).check(prompts, outputs)
    assert (moved > 0) == (config.step_interval < NEVER)
    assert np.sum(loads) > 0


def _layer(group: Group, tokens: int, top: int, redundant: int, seed: int) -> Any:
    """One layer by all-reduce and by exchange, before and after a move, beside one process's."""
    count, hidden = 8, 16
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=generator)
    chosen, weights = Routing(top).choose(torch.randn(tokens, count, generator=generator))
    whole, _ = make_products(count, hidden, 12, seed)
    assert isinstance(whole, LoopedProducts)
    expected = make_experts(whole, count)(x, chosen, weights)
    placement = np.arange(count + redundant) % count
    slots = ExpertSlots(group, placement, count)
    own = LoopedProducts(
        [whole.gate_up[e] for e in slots.held],
        [whole.down[e] for e in slots.held],
        whole.activation,
    )
    experts = make_experts(own, count)
    experts.spread = slots
    results = []
    rng = np.random.default_rng(seed)
    parts = np.array_split(np.arange(tokens), group.size)  # the last may be empty
    for _ in range(3):
        part = torch.from_numpy(parts[group.rank])
        picked = slots.choose(chosen[part])
        results.append(experts(x, chosen, weights) - expected)
        exchanged = slots.exchange(experts, x[part], picked, weights[part])
        results.append(exchanged - expected[part])
        slots.move(own, rng.permutation(slots.placement))
    return max(float(result.abs().max()) if result.numel() else 0.0 for result in results)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("tokens", "top", "redundant"), [(1, 2, 0), (3, 1, 4), (40, 3, 8)])
def test_ranks_sum_to_one_process_before_and_after_moves(
    ranks: int, tokens: int, top: int, redundant: int
) -> None:
    for differs in run_ranks(ranks, _layer, tokens, top, redundant, 5):
        assert differs < 1e-5


def test_in_decode_an_expert_is_read_by_one_rank_and_in_prefill_copies_share_its_tokens() -> None:
    everywhere = [[0, 1]] * 4
    few = share_tokens(np.array([2, 1, 1, 3]), everywhere, 2, knee=16.0)
    assert (np.minimum(few, 1).sum(1) == 1).all()  # one copy of each is read
    assert np.minimum(few, 1).sum(0).tolist() == [2, 2]
    many = share_tokens(np.array([4000, 100, 100, 100]), everywhere, 2, knee=16.0)
    assert abs(int(many.sum(0)[0]) - 2150) <= 500  # parts of an eighth
    fixed = share_tokens(np.array([600, 600]), [[0], [0, 1]], 2, knee=16.0)
    assert fixed.tolist() == [[600, 0], [0, 600]]


@settings(max_examples=examples(60))
@given(data=st.data(), ranks=st.integers(1, 4), experts=st.integers(1, 6))
def test_copies_take_all_tokens_and_never_more_time_than_the_first_copies(
    data: st.DataObject, ranks: int, experts: int
) -> None:
    tokens = np.array(data.draw(st.lists(st.integers(0, 90), min_size=experts, max_size=experts)))
    ranks_of = [
        data.draw(st.lists(st.integers(0, ranks - 1), min_size=1, max_size=3, unique=True))
        for _ in range(experts)
    ]
    shares = share_tokens(tokens, ranks_of, ranks, knee=16.0)
    assert (shares >= 0).all()
    assert shares.sum(1).tolist() == tokens.tolist()
    for expert, copies in enumerate(ranks_of):
        assert not shares[expert, len(copies) :].any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eplb_config": "{}"}, "enable_eplb is not"),
        ({"enable_eplb": True}, "enable_expert_parallel is not"),
        ({"enable_expert_parallel": True, "tensor_parallel_size": 1}, "above 1"),
        ({"enable_expert_parallel": True, "enable_eplb": True,
          "eplb_config": '{"policy": "default"}'}, "keys are window_size"),
        ({"enable_expert_parallel": True, "enable_eplb": True,
          "eplb_config": '{"window_size": 0}'}, "window_size is 0"),
    ],
)  # fmt: skip
def test_options_that_say_nothing_alone_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        WorkerConfig(**{"tensor_parallel_size": 2, **changes})


def test_what_cannot_be_spread_is_refused_by_name(folder: FindFolder) -> None:
    from pigou.runtime.models.model_config import read_config

    moe, dense = read_config(folder("qwen3_moe")), read_config(folder("llama"))
    group: Any = type("Fake", (), {"size": 3})()
    with pytest.raises(ModelError, match="no experts"):
        expert_loads(dense, group, FIXED)
    with pytest.raises(ModelError, match="tensor_parallel_size above 1"):
        expert_loads(moe, None, FIXED)
    with pytest.raises(ModelError, match="--enable-expert-parallel"):
        expert_loads(moe, group, None)
    with pytest.raises(ConfigError, match="add 2"):
        expert_loads(moe, group, FIXED)
    assert expert_loads(moe, group, EplbConfig(num_redundant_experts=2)) is not ExpertLoads
    assert expert_loads(moe, None, None) is ExpertLoads
