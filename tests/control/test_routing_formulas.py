"""Each baseline's cost, against numbers worked out by hand from its source."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from routing_fleets import PROMPT, alone, cheapest, pairs, product, split

from pigou.control.routing.policy import RoutingPolicy
from pigou.control.routing.simple_policies import LeastLoaded, PowerOfTwo, RandomRouting, RoundRobin
from pigou.control.routing.view import Candidates, FleetView
from pigou.request import Request
from pigou_lab.routing.aibrix import AibrixPrefix
from pigou_lab.routing.cache_affinity import (
    RayPrefix,
    RayPrefixParams,
    SglangCacheAware,
    SglangCacheAwareParams,
)
from pigou_lab.routing.dynamo import Dynamo, DynamoPaper, DynamoPaperParams, DynamoParams
from pigou_lab.routing.llm_d import LlmD, LlmDBlend, LlmDBlendParams, LlmDParams
from pigou_lab.routing.lmetric import LMetric, LMetricParams
from pigou_lab.routing.mooncake import Mooncake, MooncakeParams

INF = np.inf


def cost(policy: RoutingPolicy, fleet: FleetView, request: Request = PROMPT) -> Any:
    return policy.costs(request, fleet, alone(len(fleet.ids)))


def picks(policy: RoutingPolicy, fleet: FleetView, offered: Candidates) -> set[tuple[int, int]]:
    return cheapest(policy.costs(PROMPT, fleet, offered), offered)


# Without a formula


def test_random_prefers_nobody() -> None:
    assert cost(RandomRouting(), FleetView.of(3, decode_requests=[9, 0, 0])) == pytest.approx(
        [0, 0, 0]
    )


def test_random_takes_pairs_only_where_there_are_pools() -> None:
    fleet = split(2, 4)
    assert picks(RandomRouting(), fleet, product(2, 4)) == {(0, 2), (0, 3), (1, 2), (1, 3)}


def test_round_robin_takes_turns_whatever_the_load() -> None:
    policy, fleet = RoundRobin(), FleetView.of(3, decode_requests=[9, 0, 0])
    assert [int(cost(policy, fleet).argmin()) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_round_robin_passes_over_who_is_not_offered() -> None:
    policy, fleet = RoundRobin(), FleetView.of(4)
    some = pairs((-1, 0), (-1, 2), (-1, 3))
    turns = [int(some.decode[policy.costs(PROMPT, fleet, some).argmin()]) for _ in range(5)]
    assert turns == [0, 2, 3, 0, 2]


def test_round_robin_has_a_turn_for_each_pool() -> None:
    policy, fleet, offered = RoundRobin(), split(2, 5), product(2, 5)
    turns = [picks(policy, fleet, offered).pop() for _ in range(6)]
    assert turns == [(0, 2), (1, 3), (0, 4), (1, 2), (0, 3), (1, 4)]


def test_power_of_two_takes_the_less_loaded_of_two() -> None:
    policy, fleet = PowerOfTwo(seed=1), FleetView.of(4, decode_requests=[0, 1, 2, 3])
    won: Counter[int] = Counter()
    for _ in range(6000):
        costs = cost(policy, fleet)
        assert np.isfinite(costs).sum() == 2
        won[int(costs.argmin())] += 1
    # Of 6 pairs the idlest wins 3, the next 2, the next 1.
    assert [won[row] / 6000 for row in range(4)] == pytest.approx(
        [1 / 2, 1 / 3, 1 / 6, 0], abs=0.02
    )


def test_power_of_two_chooses_between_one() -> None:
    assert cost(PowerOfTwo(), FleetView.of(1, decode_requests=[5])) == pytest.approx([5])


def test_least_loaded_counts_streams_and_then_tokens() -> None:
    fleet = split(1, 3, decode_requests=[0, 2, 1], prefill_tokens=[3, 0, 0])
    costs = LeastLoaded().costs(PROMPT, fleet, pairs((-1, 1), (0, 1), (-1, 2), (0, 2)))
    assert costs == pytest.approx([2.75, 2.375, 1.75, 1.375])


# NVIDIA Dynamo


def test_paper_equation_1() -> None:
    fleet = FleetView.of(2, overlap=[20, 0], decode_tokens=[500, 33])
    # 63 blocks; 20 are held; 500 tokens fill 32 blocks, 33 fill 3.
    assert cost(DynamoPaper(), fleet) == pytest.approx([43 + 32, 63 + 3])
    heavy = DynamoPaper(DynamoPaperParams(overlap_weight=0.1))
    assert cost(heavy, fleet) == pytest.approx([4.3 + 32, 6.3 + 3])


def test_paper_equation_1_chooses_prefill_and_load_chooses_decode() -> None:
    fleet = split(2, 4, overlap=[0, 30, 60, 0], decode_tokens=[0, 0, 160, 16])
    costs = DynamoPaper().costs(PROMPT, fleet, product(2, 4))
    # (-1,2) (-1,3) (0,2) (0,3) (1,2) (1,3); the best prefill has 33 blocks left.
    assert costs == pytest.approx([INF, INF, 10 + 30, 1 + 30, 10, 1])


def test_dynamo_adds_queued_prefill_and_the_prompt_itself() -> None:
    fleet = FleetView.of(2, prefill_tokens=[320, 0], overlap=[40, 0], decode_tokens=[160, 480])
    # max(0, 20 + 62.5 - 40) + 10 + 63; max(0, 62.5) + 30 + 63
    assert cost(Dynamo(), fleet) == pytest.approx([42.5 + 73, 62.5 + 93])


def test_dynamo_credits_tiers_by_their_distance() -> None:
    fleet = FleetView.of(3, overlap=[20, 20, 20], device=[20, 0, 0], host=[0, 20, 0],
                         storage=[0, 0, 20])  # fmt: skip
    assert cost(Dynamo(), fleet) - 63 == pytest.approx([42.5, 47.5, 57.5])


def test_dynamo_decay_takes_credit_from_who_is_behind() -> None:
    fleet = FleetView.of(2, prefill_tokens=[63 * 16, 0], overlap=[40, 0])
    policy = Dynamo(DynamoParams(overlap_score_credit_decay=1.0))
    # 63 blocks more than the least over a request of 63 blocks: half the credit.
    assert cost(policy, fleet)[0] == pytest.approx(63 + 62.5 - 20 + 63)


def test_dynamo_prefill_cost_has_a_floor() -> None:
    fleet = FleetView.of(1, overlap=[62], decode_requests=[3])
    policy = Dynamo(DynamoParams(overlap_score_credit=2.0, decode_active_request_weight=4.0))
    assert cost(policy, fleet) == pytest.approx([0 + 63 + 12])


def test_dynamo_load_scale_weighs_prefill() -> None:
    fleet = FleetView.of(1, overlap=[50])
    assert cost(Dynamo(DynamoParams(prefill_load_scale=4.0)), fleet) == pytest.approx([50 + 63])


def test_dynamo_chooses_decode_without_credit_unless_it_is_left() -> None:
    fleet = split(1, 3, overlap=[0, 40, 0], decode_tokens=[0, 160, 0])
    offered = pairs((0, 1), (0, 2))
    assert Dynamo().costs(PROMPT, fleet, offered) == pytest.approx([73, 63])
    left = Dynamo(DynamoParams(decode_overlap_score_credit=1.0))
    assert left.costs(PROMPT, fleet, offered) == pytest.approx([33, 63])


def test_dynamo_explains_itself() -> None:
    fleet = split(2, 3, overlap=[10, 0, 0])
    parts = Dynamo().parts(PROMPT, fleet, pairs((0, 2), (1, 2)))
    assert parts["prefill_prefill"] == pytest.approx([52.5, 62.5])
    assert parts["prefill_best"] == pytest.approx([-52.5, -52.5])
    assert parts["decode"] == pytest.approx([63, 63])


# LMetric


def test_lmetric_multiplies_tokens_by_requests() -> None:
    fleet = FleetView.of(2, overlap=[50, 0], decode_requests=[4, 0])
    assert np.floor(cost(LMetric(), fleet)) == pytest.approx([200 * 5, 1000])


def test_lmetric_breaks_equal_products_by_load() -> None:
    fleet = FleetView.of(2, overlap=[50, 0], decode_requests=[4, 0])
    assert int(cost(LMetric(), fleet).argmin()) == 1


def test_lmetric_of_dynamo_multiplies_blocks() -> None:
    fleet = FleetView.of(1, overlap=[50], prefill_tokens=[160], decode_tokens=[320])
    policy = LMetric(LMetricParams(port="dynamo"))
    assert cost(policy, fleet) == pytest.approx([(10 + 62.5 - 50) * 21])


def test_lmetric_scores_each_pool_by_itself() -> None:
    fleet = split(2, 4, overlap=[50, 0, 0, 50], prefill_requests=[9, 0, 0, 0],
                  decode_requests=[0, 0, 0, 3])  # fmt: skip
    assert picks(LMetric(), fleet, product(2, 4)) == {(1, 3)}
    blocks = LMetric(LMetricParams(port="dynamo"))
    assert picks(blocks, fleet, product(2, 4)) == {(0, 2), (0, 3)}


# SGLang


def test_sglang_goes_where_the_prefix_is_while_load_is_even() -> None:
    fleet = FleetView.of(3, overlap=[0, 30, 20], decode_requests=[0, 60, 5])
    assert cost(SglangCacheAware(), fleet) == pytest.approx([1000, 520, 680])


def test_sglang_takes_the_shortest_queue_while_load_is_uneven() -> None:
    fleet = FleetView.of(3, overlap=[0, 30, 20], decode_requests=[0, 65, 5])
    assert cost(SglangCacheAware(), fleet) == pytest.approx([0, 65, 5])
    even = FleetView.of(3, overlap=[0, 30, 20], decode_requests=[200, 280, 250])
    assert int(cost(SglangCacheAware(), even).argmin()) == 1  # a wide gap, but under 1.5 times


def test_sglang_ignores_a_short_match() -> None:
    fleet = FleetView.of(2, overlap=[18, 0], decode_requests=[2, 1])
    assert cost(SglangCacheAware(), fleet) == pytest.approx([2, 1])
    low = SglangCacheAware(SglangCacheAwareParams(cache_threshold=0.28))
    assert int(cost(low, fleet).argmin()) == 0


# llm-d


def test_llm_d_sticks_to_the_warm() -> None:
    fleet = FleetView.of(3, overlap=[50, 60, 0], prefill_tokens=[900, 900, 0])
    # Of 62 full blocks, 50 are 0.806: both are sticky, and the third is filtered out.
    assert cost(LlmD(), fleet) == pytest.approx([900 + 200, 900 + 40, INF])
    assert cost(LlmD(LlmDParams(affinity_threshold=0.9)), fleet)[0] == INF


def test_llm_d_lets_go_when_the_warm_are_saturated() -> None:
    behind = 15928 * 18
    for tokens, sticks in ((behind, True), (behind + 16_000, False)):
        fleet = FleetView.of(2, overlap=[60, 0], prefill_tokens=[tokens, 0])
        assert np.isinf(cost(LlmD(), fleet)[1]) == sticks
    always = LlmD(LlmDParams(max_ttft_penalty=0.0))
    assert np.isinf(cost(always, fleet)[1])


def test_llm_d_without_warm_workers_counts_tokens() -> None:
    fleet = FleetView.of(2, overlap=[10, 0], prefill_tokens=[0, 100])
    assert cost(LlmD(), fleet) == pytest.approx([840, 1100])
    decode = LlmD(LlmDParams(bound="decode"))
    assert cost(decode, FleetView.of(2, decode_requests=[3, 1])) == pytest.approx([3, 1])


def test_llm_d_explores_as_often_as_it_is_told() -> None:
    fleet = FleetView.of(2, overlap=[60, 0])
    policy = LlmD(LlmDParams(exploration_probability=0.25), seed=5)
    free = sum(np.isfinite(cost(policy, fleet)[1]) for _ in range(4000))
    assert free / 4000 == pytest.approx(0.25, abs=0.03)


def test_llm_d_scores_prefill_by_tokens_and_decode_by_requests() -> None:
    fleet = split(2, 4, prefill_tokens=[500, 100, 0, 0], decode_requests=[0, 0, 1, 4])
    assert picks(LlmD(), fleet, product(2, 4)) == {(1, 2)}


def test_llm_d_blend_adds_weighted_scores() -> None:
    fleet = FleetView.of(
        3,
        overlap=[31, 0, 0],
        waiting=np.array([4.0, 0.0, 1.0]),
        kv_usage=np.array([0.5, 0.25, 1.0]),
    )
    assert cost(LlmDBlend(), fleet) == pytest.approx(
        [-(3 * 0.5 + 2 * 0 + 2 * 0.5 + 1), -(0 + 2 + 1.5 + 1), -(0 + 1.5 + 0 + 1)]
    )


def test_llm_d_blend_may_score_length() -> None:
    fleet = FleetView.of(1, overlap=[31])
    policy = LlmDBlend(LlmDBlendParams(prefix_length_weight=0.5, max_model_len=992))
    assert policy.parts(PROMPT, fleet, alone(1))["prefix"] == pytest.approx([-3 * (0.125 + 0.25)])


def test_llm_d_blend_spreads_cold_prompts() -> None:
    policy, fleet = LlmDBlend(), FleetView.of(4)
    first = [int(cost(policy, fleet).argmin()) for _ in range(8)]
    assert first == [0, 1, 2, 3, 0, 1, 2, 3]
    assert policy.parts(PROMPT, fleet, alone(4))["no_hit_lru"] == pytest.approx(
        [-2, -4 / 3, -2 / 3, 0]
    )


# AIBrix


def test_aibrix_takes_the_longest_match_that_is_not_too_busy() -> None:
    fleet = FleetView.of(4, overlap=[50, 30, 30, 0], decode_requests=[7, 3, 2, 0])
    # mean 3, sd 2.55: the longest match is above 5.55; of the equal ones the idler.
    assert cost(AibrixPrefix(), fleet).argsort().tolist() == [2, 1, 3, 0]


def test_aibrix_matches_only_the_idlest_while_load_is_uneven() -> None:
    fleet = FleetView.of(4, overlap=[50, 40, 20, 0], decode_requests=[9, 1, 0, 0])
    assert int(cost(AibrixPrefix(), fleet).argmin()) == 2
    nobody = FleetView.of(4, overlap=[50, 40, 0, 0], decode_requests=[9, 1, 0, 2])
    assert int(cost(AibrixPrefix(), nobody).argmin()) == 2


def test_aibrix_without_a_match_counts_requests() -> None:
    fleet = FleetView.of(3, decode_requests=[2, 1, 3])
    assert cost(AibrixPrefix(), fleet).argsort().tolist() == [1, 0, 2]


# Ray


def test_ray_goes_where_the_prefix_is() -> None:
    fleet = FleetView.of(2, overlap=[7, 0], decode_requests=[10, 0])
    assert cost(RayPrefix(), fleet) == pytest.approx([1000 - 112, 1000])


def test_ray_sends_a_cold_prompt_where_least_was_sent() -> None:
    fleet = FleetView.of(2, overlap=[6, 0], served=[3, 8])
    assert cost(RayPrefix(), fleet) == pytest.approx([3, 8])


def test_ray_falls_back_to_two_choices() -> None:
    fleet = FleetView.of(4, overlap=[60, 0, 0, 0], decode_requests=[11, 0, 1, 2])
    assert np.isfinite(cost(RayPrefix(), fleet)).sum() == 2
    never = RayPrefix(RayPrefixParams(imbalanced_threshold=INF))
    assert int(cost(never, fleet).argmin()) == 0


# Mooncake


def test_mooncake_predicts_ttft_and_tbt() -> None:
    fleet = FleetView.of(2, prefill_requests=[2, 0], prefill_tokens=[300, 0], overlap=[50, 10],
                         decode_requests=[4, 0])  # fmt: skip
    tbt = [0.02 + 5 * 0.0005, 0.02 + 0.0005]
    assert cost(Mooncake(), fleet) == pytest.approx(
        [(0.01 + 0.03) + (0.005 + 0.02) + tbt[0], 0.005 + 0.084 + tbt[1]]
    )


def test_mooncake_fetches_from_the_longest_prefix() -> None:
    fleet = FleetView.of(3, overlap=[50, 10, 0])
    parts = Mooncake(MooncakeParams(balancing_threshold=5.0)).parts(PROMPT, fleet, alone(3))
    assert parts["transfer"] == pytest.approx([0, 0.005 + 640e-6, 0.005 + 800e-6])
    assert parts["prefill"] == pytest.approx([0.025] * 3)
    higher = Mooncake(MooncakeParams(balancing_threshold=5.1)).parts(PROMPT, fleet, alone(3))
    assert higher["prefill"] == pytest.approx([0.025, 0.005 + 0.084, 0.025])


def test_mooncake_forbids_what_misses_an_slo() -> None:
    fleet = FleetView.of(3, prefill_tokens=[0, 9000, 0], decode_requests=[0, 0, 100])
    policy = Mooncake(MooncakeParams(ttft_slo=0.5, tbt_slo=0.05))
    assert np.isfinite(cost(policy, fleet)).tolist() == [True, False, False]
    pools = split(1, 2, prefill_tokens=[9000, 0])
    assert np.isinf(policy.costs(PROMPT, pools, product(1, 2))).all()


def test_mooncake_chooses_each_pool_by_its_own_time() -> None:
    fleet = split(2, 4, prefill_tokens=[900, 0, 0, 0], overlap=[0, 0, 60, 0],
                  decode_requests=[0, 0, 3, 1])  # fmt: skip
    assert picks(Mooncake(), fleet, product(2, 4)) == {(1, 3)}
