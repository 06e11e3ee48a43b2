"""Records, breakers and rates: the pure parts of stores and movers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_bench import NAMESPACE, SIZE, entries_of, keys_of

from pigou.kv.block import ROOT, Block
from pigou.request import SECOND
from pigou.runtime.stores.store import HEADER_BYTES, BlockRecords, decode, encode, no_records
from pigou.runtime.stores.transfer_queue import BreakerState, CircuitBreaker, TransferRate


def test_a_header_tells_what_was_written() -> None:
    entries = entries_of([1, 2, 3], expiry=77)
    sums = np.array([5, 6, 2**64 - 1], dtype=np.uint64)
    good, found, payloads = decode(encode(NAMESPACE, entries, sums, SIZE), NAMESPACE, SIZE)
    assert good.all()
    assert (payloads == sums).all()
    for name in ("keys", "parents", "depths", "expiries", "tenures"):
        assert (getattr(found, name) == getattr(entries, name)).all(), name


@given(st.integers(0, HEADER_BYTES - 1), st.integers(1, 255))
def test_a_header_with_any_byte_altered_is_none(place: int, change: int) -> None:
    sums = np.zeros(2, dtype=np.uint64)
    raw = encode(NAMESPACE, entries_of([1, 2]), sums, SIZE)
    raw[1, place] ^= change
    assert decode(raw, NAMESPACE, SIZE)[0].tolist() == [True, False]


def test_a_header_of_another_layout_or_size_is_none() -> None:
    raw = encode(NAMESPACE, entries_of([1]), np.zeros(1, dtype=np.uint64), SIZE)
    assert not decode(raw, bytes(16), SIZE)[0].any()
    assert not decode(raw, NAMESPACE, SIZE + 1)[0].any()
    assert not decode(np.zeros((3, HEADER_BYTES), dtype=np.uint8), NAMESPACE, SIZE)[0].any()


def test_records_are_cut_and_joined() -> None:
    whole = entries_of([1, 2, 3, 4])
    tail = whole.take(slice(2, 4))
    assert (tail.keys == keys_of([3, 4])).all()
    assert tail.depths.tolist() == [2, 3]
    both = BlockRecords.join([whole.take(slice(0, 2)), no_records(), tail])
    for name in ("keys", "parents", "depths", "expiries", "tenures"):
        assert (getattr(both, name) == getattr(whole, name)).all(), name


def test_columns_of_different_lengths_are_refused() -> None:
    whole = entries_of([1, 2])
    with pytest.raises(ValueError, match="depths has shape"):
        BlockRecords(whole.keys, whole.parents, whole.depths[:1], whole.expiries, whole.tenures)


def test_a_breaker_opens_after_failures_in_a_row_only() -> None:
    breaker = CircuitBreaker(3, SECOND, 8 * SECOND)
    assert not any([breaker.failed(0, "x"), breaker.failed(0, "x")])
    breaker.succeeded()
    assert not any([breaker.failed(0, "x"), breaker.failed(0, "x")])
    assert breaker.allows
    assert breaker.failed(0, "y")
    assert (breaker.allows, breaker.reason) == (False, "y")


def test_pauses_double_up_to_the_longest_until_something_succeeds() -> None:
    breaker = CircuitBreaker(1, SECOND, 8 * SECOND)
    now, pauses = 0, []
    breaker.failed(now, "x")
    for alive in (False, False, True, False, True):
        pauses.append(breaker.wait(now) // SECOND)
        now += breaker.wait(now)
        breaker.probed(now, alive)
        if alive:
            assert breaker.state is BreakerState.TRIAL
            assert breaker.allows
            assert breaker.failed(now, "again")
            assert not breaker.allows
    assert pauses == [1, 2, 4, 8, 8]
    breaker.probed(now, alive=True)
    assert breaker.succeeded()
    breaker.failed(now, "x")
    assert breaker.wait(now) == SECOND


@given(st.floats(0, 1), st.floats(1e-6, 1), st.integers(0, 3))
def test_a_rate_finds_a_link_s_latency_and_speed(latency: float, slope: float, seed: int) -> None:
    rate = TransferRate(1.0, 0.5)
    assert rate.law() == pytest.approx((1.0, 0.5))
    rng = np.random.default_rng(seed)
    for n in rng.integers(1, 200, 600).tolist():
        rate.observe(n, latency + n * slope)
    found, per_block = rate.law()
    assert found + 100 * per_block == pytest.approx(latency + 100 * slope, rel=1e-3)
    assert found + 10 * per_block == pytest.approx(latency + 10 * slope, rel=1e-2)


@given(st.lists(st.tuples(st.integers(1, 100), st.floats(0, 100)), max_size=60))
def test_a_rate_is_never_negative(seen: list[tuple[int, float]]) -> None:
    rate = TransferRate(0.01, 0.001)
    for blocks, seconds in seen:
        rate.observe(blocks, seconds)
    latency, slope = rate.law()
    assert latency >= 0
    assert slope >= 0


def test_entries_and_blocks_are_two_ways_to_say_the_same() -> None:
    entries = entries_of([5, 6, 7], expiry=99)
    again = BlockRecords.of(entries.blocks(SIZE))
    for name in ("keys", "parents", "depths", "expiries", "tenures"):
        assert (getattr(again, name) == getattr(entries, name)).all(), name


def test_a_record_keeps_the_tenant_that_is_charged() -> None:
    marks = ["", "é", "0" * 32, "0" * 33]
    blocks = [Block(bytes([i]) * 16, ROOT, 0, SIZE, tenant=mark) for i, mark in enumerate(marks, 1)]
    records = BlockRecords.of(blocks)
    good, again, _ = decode(
        encode(bytes(16), records, np.zeros(4, np.uint64), SIZE), bytes(16), SIZE
    )
    assert good.all()
    assert [block.tenant for block in again.blocks(SIZE)] == ["", "é", "0" * 32, ""]
