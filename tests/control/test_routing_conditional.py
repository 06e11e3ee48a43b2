"""Laws of conditional disaggregation by thresholds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from routing_fleets import PROMPT, alone, cheapest, pairs, product, split

from pigou.config import ConfigError
from pigou.control.routing.policy import (
    Costs,
    RequestView,
    RoutingPolicy,
    load,
    override,
    params_of,
)
from pigou.control.routing.toll.policy import Toll
from pigou.control.routing.view import Candidates, FleetView
from pigou.request import Request
from pigou_lab.routing.conditional_disaggregation import ConditionalDisaggregation
from pigou_lab.routing.dynamo import DynamoConditional
from pigou_lab.routing.llm_d import LlmDConditional

INF = np.inf


def ways(policy: RoutingPolicy, fleet: FleetView, request: Request, offered: Candidates) -> Any:
    """For each decode worker, "local" or "remote" as the threshold leaves it."""
    open_ = np.isfinite(policy.costs(request, fleet, offered))
    found: dict[int, set[str]] = {}
    for index in np.flatnonzero(open_):
        way = "local" if offered.prefill[index] < 0 else "remote"
        found.setdefault(int(offered.decode[index]), set()).add(way)
    assert all(len(each) == 1 for each in found.values())
    return {row: each.pop() for row, each in sorted(found.items())}


@pytest.mark.parametrize(
    ("prompt", "blocks", "way"),
    [
        (1000, 19, "local"),  # 696 left, 0.696 of the prompt
        (1000, 18, "remote"),  # 712 left, 0.712
        (4000, 123, "local"),  # 2032 left
        (4000, 122, "remote"),  # 2048 left: not below
        (200, 0, "remote"),  # short, but not cached
    ],
)
def test_isl_bounding_needs_few_tokens_and_a_large_share(
    prompt: int, blocks: int, way: str
) -> None:
    fleet = split(1, 2, overlap=[0, blocks])
    policy = DynamoConditional()
    assert ways(policy, fleet, Request("r", prompt, 9), product(1, 2)) == {1: way}


def test_isl_bounding_weighs_tiers() -> None:
    fleet = split(1, 3, overlap=[0, 25, 26], host=[0, 25, 26])
    # 0.75 of 25 blocks are 300 tokens (700 left, 0.7: not below), of 26 are 312.
    found = ways(DynamoConditional(), fleet, PROMPT, product(1, 3))
    assert found == {1: "remote", 2: "local"}
    full = override(DynamoConditional(), {"host_cache_hit_weight": 1.0})
    assert ways(full, fleet, PROMPT, product(1, 3)) == {1: "local", 2: "local"}


def test_prefill_load_asks_the_prefill_worker_that_would_be_chosen() -> None:
    policy = override(
        load("dynamo-conditional"),
        {"policy": "prefill_load", "prefill_busy_threshold": 1, "max_num_batched_tokens": 500},
    )
    for tokens, way in (([600, 501], "local"), ([600, 500], "remote"), ([0, 600], "remote")):
        fleet = split(2, 3, prefill_tokens=[*tokens, 0])
        assert ways(policy, fleet, PROMPT, product(2, 3)) == {2: way}


def test_isl_or_load_is_either() -> None:
    values = {"policy": "isl_or_load", "prefill_busy_threshold": 1.0}
    policy = load("dynamo-conditional", values)
    calm = split(1, 3, overlap=[0, 60, 0])
    assert ways(policy, calm, PROMPT, product(1, 3)) == {1: "local", 2: "remote"}
    busy = split(1, 3, overlap=[0, 60, 0], prefill_tokens=[9000, 0, 0])
    assert ways(policy, busy, PROMPT, product(1, 3)) == {1: "local", 2: "local"}


def test_busy_decode_workers_take_no_prompt() -> None:
    policy = load("dynamo-conditional", {"decode_busy_threshold": 0.9})
    fleet = split(1, 4, overlap=[0, 60, 60, 60], decode_tokens=[0, 427 * 16, 428 * 16, 0],
                  blocks=[0, 545, 545, 0])  # fmt: skip
    # 63 blocks more make 490 of 545 (0.9 is 490.5) and 491; the last did not say how many.
    found = ways(policy, fleet, PROMPT, product(1, 4))
    assert found == {1: "local", 2: "remote", 3: "remote"}


def test_a_look_ahead_uses_up_no_turn() -> None:
    policy = load("dynamo-conditional", {"inner": "round-robin", "policy": "prefill_load"})
    fleet, offered = split(2, 4), product(2, 4)
    turns = [cheapest(policy.costs(PROMPT, fleet, offered), offered).pop() for _ in range(3)]
    assert turns == [(0, 2), (1, 3), (0, 2)]


def test_dynamo_inside_keeps_its_credit_for_decode() -> None:
    fleet = split(1, 3, overlap=[0, 60, 50], decode_tokens=[0, 160, 0])
    offered = product(1, 3)
    costs = DynamoConditional().costs(PROMPT, fleet, offered)
    # (-1,1) (-1,2) (0,1) (0,2): max(0, 73 - 60), max(0, 63 - 50)
    assert costs == pytest.approx([13, 13, INF, INF])


@pytest.mark.parametrize(
    ("values", "blocks", "way"),
    [
        ({}, 30, "remote"),  # 520 left
        ({}, 31, "local"),  # 504 left
        ({"non_cached_tokens": 0}, 0, "local"),
        ({"non_cached_tokens": 1, "prompt_tokens": 1001}, 0, "local"),
        ({"non_cached_tokens": 1, "prompt_tokens": 1000}, 0, "remote"),
    ],
)
def test_llm_d_needs_many_tokens_and_a_long_prompt(
    values: dict[str, int], blocks: int, way: str
) -> None:
    fleet = split(1, 2, overlap=[0, blocks])
    policy = load("llm-d-conditional", values)
    assert ways(policy, fleet, PROMPT, product(1, 2)) == {1: way}


@given(
    overlap=st.lists(st.integers(0, 62), min_size=5, max_size=5),
    streams=st.lists(st.integers(0, 9), min_size=5, max_size=5),
)
def test_decode_is_chosen_first_and_then_the_way(overlap: list[int], streams: list[int]) -> None:
    fleet = split(2, 5, overlap=overlap, decode_requests=streams)
    offered = product(2, 5)
    policy = load("llm-d-conditional", {"affinity_threshold": 1.0})
    best = cheapest(policy.costs(PROMPT, fleet, offered), offered)
    plain = load("llm-d", {"affinity_threshold": 1.0})
    first = {d for _, d in cheapest(plain.costs(PROMPT, fleet, offered), offered)}
    assert {d for _, d in best} == first
    for prefill, decode in best:
        assert (prefill < 0) == (1000 - 16 * overlap[decode] < 512)


def test_what_is_offered_in_one_way_keeps_it() -> None:
    fleet = split(1, 3, overlap=[0, 0, 60])
    only = pairs((-1, 1), (0, 2))
    threshold = LlmDConditional().parts(PROMPT, fleet, only)["threshold"]
    assert threshold == pytest.approx([0, 0])
    both = FleetView.of(3)
    assert np.isfinite(DynamoConditional().costs(PROMPT, both, alone(3))).all()


@pytest.mark.parametrize("name", ["least-loaded", "dynamo-paper", "mooncake", "random", "toll"])
@pytest.mark.parametrize("kind", ["dynamo-conditional", "llm-d-conditional"])
def test_any_policy_may_be_inside(kind: str, name: str) -> None:
    policy = load(kind, {"inner": name})
    assert isinstance(policy, ConditionalDisaggregation)
    assert type(policy.inner) is type(load(name))
    fleet = split(1, 3, overlap=[0, 60, 0])
    assert ways(policy, fleet, PROMPT, product(1, 3)) == {1: "local", 2: "remote"}


@pytest.mark.parametrize("kind", ["dynamo-conditional", "llm-d-conditional"])
def test_the_policy_inside_takes_note_of_the_choice(kind: str) -> None:
    policy, alone_ = load(kind, {"inner": "toll"}), Toll()
    assert isinstance(policy, ConditionalDisaggregation)
    fleet, offered = split(1, 3, overlap=[0, 60, 0]), product(1, 3)
    parts = policy.parts(PROMPT, fleet, offered)
    allowed = np.flatnonzero(np.isfinite(parts["threshold"]))
    assert 0 < len(allowed) < len(offered)
    chosen = int(allowed[-1])
    policy.note(PROMPT, fleet, offered, chosen, parts)
    left = Candidates(offered.prefill[allowed], offered.decode[allowed])
    alone_.note(PROMPT, fleet, left, len(allowed) - 1, alone_.parts(PROMPT, fleet, left))
    assert isinstance(policy.inner, Toll)
    assert policy.inner.recent_ttft.seconds == alone_.recent_ttft.seconds > 0.0


def test_a_policy_without_parts_may_be_inside() -> None:
    class Plain:
        def costs(self, request: RequestView, fleet: FleetView, candidates: Candidates) -> Costs:
            return fleet.decode_requests[candidates.decode].astype(float)

    policy = LlmDConditional()
    policy.inner = Plain()
    parts = policy.parts(PROMPT, split(1, 2, decode_requests=[0, 4]), product(1, 2))
    assert parts["cost"] == pytest.approx([0, 4])
    assert parts["threshold"] == pytest.approx([INF, 0])


def test_parameters_of_the_policy_inside_are_set_beside_its_own() -> None:
    policy = load("llm-d-conditional", {"inner": "dynamo-paper", "overlap_weight": 2.0})
    assert params_of(policy)["overlap_weight"] == 2.0
    changed = override(policy, {"overlap_weight": 0.5, "non_cached_tokens": 64.0})
    assert params_of(changed)["overlap_weight"] == 0.5
    assert params_of(changed)["non_cached_tokens"] == 64
    assert params_of(policy)["overlap_weight"] == 2.0
    assert params_of(policy)["non_cached_tokens"] == 512


def test_an_unknown_parameter_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"overlap_weight is no parameter.*non_cached_tokens"):
        load("llm-d-conditional", {"overlap_weight": 2.0})
    with pytest.raises(ConfigError, match=r"'nobody'; it must be one of: .*llm-d"):
        load("llm-d-conditional", {"inner": "nobody"})
