"""Routed experts: known answers, both kinds of products, counts."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tests.lib.examples import examples
from torch import Tensor

from pigou.runtime.models.experts import (
    ClampedGate,
    Experts,
    GroupedProducts,
    LoopedProducts,
    Products,
    Routing,
    adopt_experts,
)
from pigou.runtime.models.linear import Linear
from pigou.runtime.models.weights import Weights, WeightSource
from pigou.runtime.ops import KernelOps, TorchOps
from reference import report

GATE = TorchOps().gate


def make_experts(products: Products, count: int) -> Experts:
    experts = Experts(
        torch.zeros(count, dtype=torch.int64), torch.zeros(1).long(), list(range(count))
    )
    experts.products = products
    return experts


def make_products(count: int, hidden: int, width: int, seed: int) -> tuple[Products, Products]:
    """The same weights, looped over and grouped."""
    generator = torch.Generator().manual_seed(seed)
    gate_up = torch.randn(count, 2 * width, hidden, generator=generator) * hidden**-0.5
    down = torch.randn(count, hidden, width, generator=generator) * width**-0.5
    looped = LoopedProducts([Linear(w) for w in gate_up], [Linear(w) for w in down], GATE)
    return looped, GroupedProducts(gate_up.mT, down.mT, GATE)


def test_deepseeks_router_chooses_within_the_best_groups() -> None:
    scores = torch.tensor([[0.9, 0.1, 0.2, 0.3, 0.8, 0.7, 0.05, 0.6]])
    bias = torch.tensor([0, 0, 0.5, 0.5, 0, 0, 0, 0])
    routing = Routing(3, "sigmoid", groups=4, best_groups=2, scale=2.5)
    experts, weights = routing.choose(scores.logit(), bias)
    chosen = dict(zip(experts[0].tolist(), weights[0].tolist(), strict=True))
    assert chosen == pytest.approx({2: 0.384615, 3: 0.576923, 4: 1.538462}, abs=1e-6)


def test_an_excluded_group_stays_excluded_where_all_biased_scores_are_negative() -> None:
    routing = Routing(2, "sigmoid", groups=2, best_groups=1)
    bias = torch.tensor([-3.0, -3.0, -5.0, -5.0])
    experts, _ = routing.choose(torch.zeros(1, 4), bias)
    assert set(experts[0].tolist()) == {0, 1}


def test_softmax_of_the_chosen_is_the_chosen_softmax_renormalised() -> None:
    logits = torch.tensor([[300.0, 1.0, 120.0, 2.0, 110.0]])
    experts, weights = Routing(3).choose(logits)
    assert experts.tolist() == [[0, 2, 4]]  # a softmax underflows to 0 for 2 and 4
    torch.testing.assert_close(weights, torch.tensor([[300.0, 120.0, 110.0]]).softmax(-1))
    _, raw = Routing(2, normalise=False).choose(torch.tensor([[1.0, 2.0, 3.0]]))
    assert raw[0].tolist() == pytest.approx([0.665241, 0.244728], abs=1e-6)


def test_gpt_oss_clamps_its_gate() -> None:
    x = torch.tensor([[8.0, 9.0, 1.0, -0.5]])
    assert ClampedGate()(x)[0].tolist() == pytest.approx([55.999625, 0.422898], abs=1e-5)


@pytest.mark.parametrize(
    ("experts", "top", "batch", "expected"),
    [(128, 8, 16, 82.423), (8, 2, 4, 5.469), (128, 8, 1, 8)],
)
def test_uniform_routing_hits_as_many_experts_as_the_formula(
    experts: int, top: int, batch: int, expected: float
) -> None:
    counted = make_experts(make_products(experts, 2, 1, 0)[0], experts)
    generator = torch.Generator().manual_seed(1)
    steps = 400
    for _ in range(steps):
        chosen, weights = Routing(top).choose(torch.rand(batch, experts, generator=generator))
        counted(torch.zeros(batch, 2), chosen, weights)
    assert int(counted.loads.sum()) == steps * batch * top
    assert int(counted.activated) / steps == pytest.approx(expected, rel=0.01)
    assert experts * (1 - (1 - top / experts) ** batch) == pytest.approx(expected, abs=1e-3)


@settings(max_examples=examples(40))
@given(
    tokens=st.integers(1, 40), experts=st.integers(1, 9), data=st.data(), seed=st.integers(0, 99)
)
def test_both_products_equal_the_sum_over_tokens(
    tokens: int, experts: int, data: st.DataObject, seed: int
) -> None:
    top = data.draw(st.integers(1, experts))
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(rng.standard_normal((tokens, 8))).float()
    chosen, weights = Routing(top).choose(torch.from_numpy(rng.standard_normal((tokens, experts))))
    looped, grouped = make_products(experts, 8, 4, seed)
    assert isinstance(looped, LoopedProducts)
    if data.draw(st.booleans()):
        biases = torch.randn(experts, 8), torch.randn(experts, 8)
        assert isinstance(grouped, GroupedProducts)
        grouped.gate_up_bias, grouped.down_bias = biases
        for linears, bias in zip((looped.gate_up, looped.down), biases, strict=True):
            for linear, row in zip(linears, bias, strict=True):
                linear.bias = row
    expected = torch.zeros_like(x)
    for token, k in itertools.product(range(tokens), range(top)):
        expert, weight = int(chosen[token, k]), weights[token, k]
        row = x[token : token + 1]
        out: Tensor = looped.down[expert](GATE(looped.gate_up[expert](row)))[0]
        expected[token] += out * weight
    for products in (looped, grouped):
        layer = make_experts(products, experts)
        torch.testing.assert_close(layer(x, chosen, weights), expected, rtol=1e-5, atol=1e-5)
        assert layer.loads.tolist() == np.bincount(chosen.flatten(), minlength=experts).tolist()


SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 300, "max_position_embeddings": 256,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "head_dim": 8, "num_key_value_heads": 4, "n_routed_experts": 8,
    "num_local_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
    "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
QWEN = {"num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ADOPTED: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {**QWEN, "num_experts": 8, "shared_expert_intermediate_size": 48},
    "qwen3_moe": QWEN,
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2, "eos_token_id": 2},
    "gpt_oss": {**QWEN, "sliding_window": 8},
    "deepseek_v2": {**LATENT, "topk_method": "greedy", "n_group": 1, "topk_group": 1},
    "deepseek_v3": {**LATENT, "n_group": 4, "topk_group": 2},
    "glm4_moe": {**LATENT, "n_group": 2, "topk_group": 1},
    "granitemoe": {"num_local_experts": 4},
}


@pytest.fixture(scope="module", params=ADOPTED)
def pair(request: pytest.FixtureRequest) -> tuple[str, Any, Any, Any]:
    """A family's tiny model, and a copy whose experts are ours."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(request.param, **{**SMALL, **ADOPTED[request.param]})
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            weight.normal_(std=0.12 if weight.dim() > 1 else 0.05)
            weight.add_(1.0 if "norm" in name else 0.0)
        for name, bias in theirs.named_buffers():
            if "correction" in name:
                bias.uniform_(-0.5, 0.5)
    ours = copy.deepcopy(theirs)
    source = WeightSource(torch.float32, torch.device("cpu"))
    loads = adopt_experts(ours, source, KernelOps().gate)
    return request.param, theirs, ours, loads


def routes(model: Any, tokens: Tensor) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
    """Logits of a prompt, and what each layer's experts were given."""
    given: list[tuple[Tensor, ...]] = []

    def note(_: Any, arguments: tuple[Tensor, ...]) -> None:
        given.append(tuple(argument.flatten(0, -2) for argument in arguments))

    hooks = [
        module.register_forward_pre_hook(note)
        for name, module in model.named_modules()
        if name.endswith(".experts")
    ]
    with torch.inference_mode():
        logits: Tensor = model(tokens[None]).logits[0]
    for hook in hooks:
        hook.remove()
    return logits, given


def test_adopted_experts_choose_and_compute_as_transformers(
    pair: tuple[str, Any, Any, Any],
) -> None:
    family, theirs, ours, loads = pair
    tokens = torch.from_numpy(np.random.default_rng(3).integers(3, 300, size=120))
    expected, their_routes = routes(theirs, tokens)
    logits, our_routes = routes(ours, tokens)
    torch.testing.assert_close(logits, expected, rtol=0.0, atol=1e-5)
    assert len(our_routes) == len(their_routes) == len(loads.layers)
    excused = 0
    for (_, chosen, weights), (_, their_chosen, their_weights) in zip(
        our_routes, their_routes, strict=True
    ):
        order, their_order = chosen.argsort(1), their_chosen.argsort(1)
        same = (chosen.gather(1, order) == their_chosen.gather(1, their_order)).all(1)
        gaps = (weights.sort(1).values - their_weights.sort(1).values).abs().amax(1)
        assert (gaps[~same] < 1e-6).all()  # chosen otherwise only where scores tie
        excused += int((~same).sum())
        torch.testing.assert_close(
            weights.gather(1, order)[same], their_weights.gather(1, their_order)[same],
            rtol=1e-5, atol=1e-6,
        )  # fmt: skip
    report(
        f"{family}: experts of {len(tokens)} tokens by layer as transformers', {excused} excused"
    )


def test_mxfp4_experts_are_read_as_their_format_says(tmp_path: Path) -> None:
    blocks, scales = torch.zeros(2, 6, 3, 16).byte(), torch.full((2, 6, 3), 127).byte()
    blocks[1, 5, 2, 0], scales[1, 5, 2] = 0x9F, 128  # low nibble first: -6, then -0.5
    tensors = {"experts.down_proj_blocks": blocks, "experts.down_proj_scales": scales}
    save_file(tensors, tmp_path / "model.safetensors")
    with Weights(tmp_path, torch.float32, torch.device("cpu")) as weights:
        taken = weights.take_all()["experts.down_proj"]
    wanted = torch.zeros(2, 96, 6)
    wanted[1, 64, 5], wanted[1, 65, 5] = -12.0, -1.0
    assert torch.equal(taken, wanted)
