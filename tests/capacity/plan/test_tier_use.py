"""What tiers hold of a workload."""

from __future__ import annotations

import pytest

from pigou.capacity.plan.tiers import hit_rate_within, recurring_tokens
from pigou.sim.workload import RequestSpec


def asked(*blocks: int) -> RequestSpec:
    """Return a request of blocks of 10 tokens, and 10 tokens more."""
    return RequestSpec(10 * len(blocks) + 10, 5, blocks, block_tokens=10.0)


REQUESTS = [asked(1, 2), asked(3, 4), asked(1, 2), asked(1, 5)]


def test_blocks_recur_that_several_prompts_have() -> None:
    assert recurring_tokens(REQUESTS) == 20.0


@pytest.mark.parametrize(
    ("tokens", "hits"), [(1000.0, 30.0), (40.0, 30.0), (20.0, 10.0), (0.0, 0.0)]
)
def test_a_smaller_cache_evicts_what_was_not_used_for_longest(tokens: float, hits: float) -> None:
    assert hit_rate_within(REQUESTS, tokens) == pytest.approx(hits / 120.0)
