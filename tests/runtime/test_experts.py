"""Routed experts: known answers, both kinds of products, counts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lib.examples import examples
from torch import Tensor

from pigou.runtime.models.experts import (
    ClampedGate,
    Experts,
    GroupedProducts,
    LoopedProducts,
    Products,
    Routing,
)
from pigou.runtime.models.linear import Linear
from pigou.runtime.ops import TorchOps

GATE = TorchOps().gate


def make_experts(products: Products, count: int) -> Experts:
    experts = Experts(torch.zeros(count, dtype=torch.int64), torch.zeros(1).long())
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
    experts, weights = routing.select(scores, bias)
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
    weigh_input = data.draw(st.booleans())
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(rng.standard_normal((tokens, 8))).float()
    chosen, weights = Routing(top).choose(torch.from_numpy(rng.standard_normal((tokens, experts))))
    looped, grouped = make_products(experts, 8, 4, seed)
    assert isinstance(looped, LoopedProducts)
    expected = torch.zeros_like(x)
    for token, k in itertools.product(range(tokens), range(top)):
        expert, weight = int(chosen[token, k]), weights[token, k]
        row = x[token : token + 1] * (weight if weigh_input else 1.0)
        out: Tensor = looped.down[expert](GATE(looped.gate_up[expert](row)))[0]
        expected[token] += out * (1.0 if weigh_input else weight)
    for products in (looped, grouped):
        layer = make_experts(products, experts)
        layer.weigh_input = weigh_input
        torch.testing.assert_close(layer(x, chosen, weights), expected, rtol=1e-5, atol=1e-5)
        assert layer.loads.tolist() == np.bincount(chosen.flatten(), minlength=experts).tolist()
