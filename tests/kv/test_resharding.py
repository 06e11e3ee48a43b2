"""Resharding: every head of every target rank arrives once, whatever the two TPs are."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pigou.kv.resharding import HeadSlice, TransferSplit, head_slices, heads_of_rank, split_of


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, int, int]:
    kv_heads = draw(st.integers(1, 24))
    tps = [tp for tp in range(1, 49) if kv_heads % tp == 0 or tp % kv_heads == 0]
    return kv_heads, draw(st.sampled_from(tps)), draw(st.sampled_from(tps))


@given(cases())
def test_every_head_of_every_target_rank_arrives_once_from_a_rank_that_has_it(
    case: tuple[int, int, int],
) -> None:
    kv_heads, source_tp, target_tp = case
    arrived: Counter[tuple[int, int]] = Counter()
    for part in head_slices(*case):
        heads = range(part.first, part.first + part.heads)
        assert set(heads) <= set(heads_of_rank(kv_heads, source_tp, part.source))
        arrived.update((part.target, head) for head in heads)
    wanted = {
        (rank, head)
        for rank in range(target_tp)
        for head in heads_of_rank(kv_heads, target_tp, rank)
    }
    assert arrived == dict.fromkeys(wanted, 1)


@given(cases())
def test_bytes_are_those_of_the_target_ranks_and_no_source_rank_sends_more_than_its_part(
    case: tuple[int, int, int],
) -> None:
    kv_heads, source_tp, target_tp = case
    heads = sum(part.heads for part in head_slices(*case))
    assert heads == max(kv_heads, target_tp)
    split = split_of(*case)
    assert split.target_share == max(1, kv_heads // target_tp) / kv_heads
    assert heads / kv_heads / source_tp <= split.source_share
    # Copies are read evenly: no rank sends its heads once more than it has to.
    readers = -(-max(1, target_tp // kv_heads) // max(1, source_tp // kv_heads))
    assert split.source_share <= readers * max(1, kv_heads // source_tp) / kv_heads


@given(cases())
def test_equal_tp_pairs_equal_ranks_with_all_their_heads(case: tuple[int, int, int]) -> None:
    kv_heads, tp, _ = case
    whole = [heads_of_rank(kv_heads, tp, rank) for rank in range(tp)]
    assert head_slices(kv_heads, tp, tp) == [
        HeadSlice(rank, rank, heads.start, len(heads)) for rank, heads in enumerate(whole)
    ]


def test_splits_of_known_shapes() -> None:
    assert split_of(8, 4, 8) == TransferSplit(1 / 4, 1 / 8, 2)  # a rank sends two, 1 head each
    assert split_of(8, 8, 2) == TransferSplit(1 / 8, 1 / 2, 4)
    assert split_of(1, 2, 8) == TransferSplit(4.0, 1.0, 4)  # MLA: whole copies
    assert split_of(2, 1, 8) == TransferSplit(4.0, 1 / 2, 8)  # each head four times


@pytest.mark.parametrize("tp", [0, 3, 12])
def test_heads_that_cannot_be_divided_are_refused(tp: int) -> None:
    with pytest.raises(ValueError, match=f"tp is {tp}; it must divide, or be a multiple of, 8 KV"):
        split_of(8, 4, tp)


def test_resliced_caches_hold_what_each_rank_would_have_computed() -> None:
    heads, source_tp, target_tp = 8, 16, 4
    whole = np.arange(heads * 3).reshape(heads, 3)
    caches = [whole[list(heads_of_rank(heads, source_tp, rank))] for rank in range(source_tp)]
    targets = [np.full((heads // target_tp, 3), -1) for _ in range(target_tp)]
    for source, target, first, count in head_slices(heads, source_tp, target_tp):
        there = first - heads_of_rank(heads, source_tp, source).start
        here = first - heads_of_rank(heads, target_tp, target).start
        targets[target][here : here + count] = caches[source][there : there + count]
    assert (np.concatenate(targets) == whole).all()
