"""The kinds of workers that GPUs can be made into."""

from __future__ import annotations

import pytest

from pigou.capacity.plan.search_space import worker_kinds
from pigou.models.read import architecture
from pigou.request import Role


@pytest.mark.parametrize(
    ("gpu", "count", "widest"),
    [("H200", 32, 8), ("H100 NVL", 16, 2), ("H200 NVL", 16, 4), ("GB200", 32, 32), ("H200", 3, 2)],
)
def test_a_worker_ends_at_the_node_unless_its_gpus_are_of_a_rack(
    gpu: str, count: int, widest: int
) -> None:
    kinds = worker_kinds(architecture("Qwen3-32B-FP8"), {gpu: count}, Role.DECODE, ("",))
    assert max(kind.tp for kind in kinds) == widest


def test_experts_are_spread_over_ranks_beyond_a_node_and_dense_models_are_not() -> None:
    kinds = worker_kinds(architecture("deepseek-v3"), {"H200": 64}, Role.DECODE, ("",))
    assert {(kind.tp, kind.dp, kind.ep) for kind in kinds} == {
        *((tp, 1, False) for tp in (1, 2, 4, 8)), *((1, dp, True) for dp in (2, 4, 8, 16, 32, 64)),
    }  # fmt: skip
    assert max(kind.gpus for kind in kinds) == 64
    dense = worker_kinds(architecture("llama-3.1-8b"), {"H200": 64}, Role.DECODE, ("",))
    assert not any(kind.ep for kind in dense)
