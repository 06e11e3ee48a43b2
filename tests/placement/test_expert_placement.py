"""Experts on ranks: EPLB's known answers, a packing that is never worse, moves that pay."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pigou.placement.expert_placement import (
    ExpertRanks,
    balance,
    imbalance,
    keep_slots,
    pack,
    pack_bound,
    pack_greedy,
    rank_loads,
    rebalance,
    replicate,
)

#: First layer of EPLB's README.
LOADS = np.array([90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86], dtype=float)


def heaviest(placement: np.ndarray, loads: np.ndarray, ranks: int) -> float:
    return float(rank_loads(placement, loads, ranks).max())


def optimum(weights: np.ndarray, packs: int) -> float:
    """Heaviest pack of the best packing, by trying all."""
    items = frozenset(range(len(weights)))
    size = len(weights) // packs

    def best(left: frozenset[int]) -> float:
        if not left:
            return 0.0
        first, *others = sorted(left)
        return min(
            max(weights[[first, *rest]].sum(), best(left - {first, *rest}))
            for rest in combinations(others, size - 1)
        )

    return float(best(items))


def test_replication_is_eplbs() -> None:
    copies = replicate(LOADS, 16)
    assert copies.tolist() == [1, 2, 1, 1, 2, 2, 1, 1, 1, 1, 2, 1]
    assert (LOADS / copies).max() == 91.5


def test_greedy_packing_is_eplbs() -> None:
    loads = rank_loads(balance(LOADS, ExpertRanks(8, 16), pack_greedy), LOADS, 8)
    assert loads.tolist() == [130.5, 95.5, 130, 138, 138.5, 134.5, 134, 132]
    assert heaviest(balance(LOADS, ExpertRanks(4, 12), pack_greedy), LOADS, 4) == 277


def test_exchanges_reach_the_optimum_that_greedy_misses() -> None:
    assert heaviest(balance(LOADS, ExpertRanks(4, 12)), LOADS, 4) == optimum(LOADS, 4) == 260


def test_groups_stay_on_one_node_as_eplbs_hierarchical_form_keeps_them() -> None:
    ranks = ExpertRanks(ranks=8, slots=16, nodes=2, groups=4)
    for placement in (balance(LOADS, ranks, pack_greedy), balance(LOADS, ranks)):
        nodes = [set((node // 3).tolist()) for node in placement.reshape(2, 8)]
        assert nodes[0].isdisjoint(nodes[1])
        assert nodes[0] | nodes[1] == {0, 1, 2, 3}
    # The answer of EPLB's README for this layer.
    assert [set(node.tolist()) for node in balance(LOADS, ranks, pack_greedy).reshape(2, 8)] in (
        [{5, 6, 7, 8, 4, 3}, {10, 9, 1, 2, 0, 11}], [{10, 9, 1, 2, 0, 11}, {5, 6, 7, 8, 4, 3}],
    )  # fmt: skip


@st.composite
def layers(draw: st.DrawFn) -> tuple[np.ndarray, ExpertRanks]:
    ranks, each = draw(st.integers(1, 8)), draw(st.integers(1, 6))
    experts = draw(st.integers(1, ranks * each))
    nodes = draw(st.sampled_from([n for n in range(1, ranks + 1) if ranks % n == 0]))
    groups = draw(st.sampled_from([g for g in range(1, experts + 1) if experts % g == 0]))
    loads = draw(st.lists(st.integers(0, 1000), min_size=experts, max_size=experts))
    return np.array(loads, dtype=float), ExpertRanks(ranks, ranks * each, nodes, groups)


@given(layers())
def test_ours_is_never_heavier_than_eplb_and_every_expert_has_a_slot(
    layer: tuple[np.ndarray, ExpertRanks],
) -> None:
    loads, ranks = layer
    ours, theirs = balance(loads, ranks), balance(loads, ranks, pack_greedy)
    assert heaviest(ours, loads, ranks.ranks) <= heaviest(theirs, loads, ranks.ranks) + 1e-9
    for placement in (ours, theirs):
        assert set(placement.tolist()) == set(range(len(loads)))
        assert len(placement) == ranks.slots
        assert rank_loads(placement, loads, ranks.ranks).sum() == pytest.approx(loads.sum())


@given(st.lists(st.integers(0, 100), min_size=9, max_size=9))
def test_a_small_packing_is_between_its_bound_and_greedy_and_near_the_optimum(
    values: list[int],
) -> None:
    weights = np.array(values, dtype=float)
    least = optimum(weights, 3)
    ours = np.bincount(pack(weights, 3), weights, 3).max()
    greedy = np.bincount(pack_greedy(weights, 3), weights, 3).max()
    assert pack_bound(weights, 3) - 1e-9 <= least <= ours <= greedy
    assert ours <= 1.1 * least  # greedy: up to a quarter above


@given(layers(), st.integers(0, 2**32 - 1))
def test_renamed_ranks_move_nothing_and_other_moves_are_counted(
    layer: tuple[np.ndarray, ExpertRanks], seed: int
) -> None:
    loads, ranks = layer
    current, rng = balance(loads, ranks, pack_greedy), np.random.default_rng(seed)
    nodes = current.reshape(ranks.grouped, ranks.ranks // ranks.grouped, -1)
    shuffled = np.array([rng.permutation(node) for node in rng.permutation(nodes)])
    kept, moved = keep_slots(rng.permuted(shuffled, axis=2).ravel(), current, ranks)
    assert (moved, kept.tolist()) == (0, current.tolist())
    target = balance(loads, ranks)
    kept, moved = keep_slots(target, current, ranks)
    assert heaviest(kept, loads, ranks.ranks) == pytest.approx(heaviest(target, loads, ranks.ranks))
    rows = zip(kept.reshape(ranks.ranks, -1), current.reshape(ranks.ranks, -1), strict=True)
    assert moved == sum(len(set(new.tolist()) - set(old.tolist())) for new, old in rows)


def test_a_move_needs_imbalance_above_a_fifth_and_must_pay() -> None:
    ranks, loads = ExpertRanks(4, 12), LOADS / LOADS.sum()
    even = balance(loads, ranks)
    figures = {"expert_bytes": 1e6, "bytes_per_s": 1e9}
    assert rebalance(even, loads, ranks, horizon_s=1e9, **figures) is None  # balanced
    current = np.argsort(LOADS)  # heaviest together
    made = rebalance(current, loads, ranks, horizon_s=1e6, **figures)
    assert made is not None
    assert made.after <= 0.01
    assert made.before > 0.2
    assert made.gain * 1e6 > made.moved_bytes / 1e9
    least = made.moved_bytes / 1e9 / made.gain  # the horizon at which this move breaks even
    short = rebalance(current, loads, ranks, horizon_s=least / 2, **figures)
    assert short is None or short.moved < made.moved  # few exchanges pay sooner
    assert rebalance(current, loads, ranks, horizon_s=1e-9, **figures) is None


def test_few_moves_are_preferred_where_the_horizon_is_short() -> None:
    rng, ranks = np.random.default_rng(0), ExpertRanks(32, 288)
    loads = rng.gamma(2.0, 1.0, 256)
    loads /= loads.sum()
    current = balance(loads, ranks)
    drifted = loads * rng.lognormal(0.0, 0.6, 256)
    figures = {"expert_bytes": 44e6, "bytes_per_s": 25e9}
    moves = [
        rebalance(current, drifted, ranks, horizon_s=horizon, **figures)
        for horizon in (5.0, 1e6)
    ]  # fmt: skip
    assert moves[0] is not None
    assert moves[1] is not None
    assert moves[0].moved < moves[1].moved
    assert imbalance(rank_loads(moves[1].placement, drifted, 32)) < moves[0].after


@pytest.mark.parametrize(
    ("ranks", "word"),
    [(ExpertRanks(5, 16), "slots is 16"), (ExpertRanks(4, 8), "12 experts"),
     (ExpertRanks(8, 16, nodes=3), "ranks is 8"), (ExpertRanks(8, 16, groups=5), "experts is 12")],
)  # fmt: skip
def test_ranks_that_cannot_hold_the_experts_are_refused(ranks: ExpertRanks, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        balance(LOADS, ranks)
