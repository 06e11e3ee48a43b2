"""Splits over tiers: FlexGen's linear programme beside the greedy split."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pigou.capacity.plan.tiers import StorageTier, greedy_split, split
from pigou.config import ConfigError

GPU = StorageTier(name="gpu", capacity_gb=10.0, bandwidth_gb_s=2000.0)
HOST = StorageTier(name="host", capacity_gb=400.0, bandwidth_gb_s=25.0)
DISK = StorageTier(name="disk", capacity_gb=math.inf, bandwidth_gb_s=5.0)


def test_tiers_that_are_read_at_once_end_together() -> None:
    found = split(200.0, (GPU, HOST, DISK))
    assert found.gb == pytest.approx({"gpu": 10.0, "host": 158.333, "disk": 31.667}, abs=5e-4)
    assert found.seconds == pytest.approx(6.333, abs=5e-4)
    assert greedy_split(200.0, (GPU, HOST, DISK)).seconds == pytest.approx(190.0 / 25.0)


def test_in_series_the_fastest_is_filled_first() -> None:
    tiers = (DISK, GPU, HOST)
    found, greedy = (rule(500.0, tiers, parallel=False) for rule in (split, greedy_split))
    assert found.gb == pytest.approx({"gpu": 10.0, "host": 400.0, "disk": 90.0})
    assert found.gb == pytest.approx(greedy.gb)
    assert found.seconds == pytest.approx(greedy.seconds)


SIZES = st.floats(1.0, 500.0)
TIERS = st.lists(st.tuples(SIZES, SIZES), min_size=1, max_size=4).map(
    lambda rows: [
        StorageTier(name=f"t{i}", capacity_gb=size, bandwidth_gb_s=speed)
        for i, (size, speed) in enumerate(rows)
    ]
)


@given(tiers=TIERS, share=st.floats(0.1, 0.9), parallel=st.booleans())
def test_nothing_is_lost_and_no_greedy_split_is_read_sooner(
    tiers: list[StorageTier], share: float, parallel: bool
) -> None:
    gb = share * sum(tier.capacity_gb for tier in tiers)
    found, greedy = (rule(gb, tiers, parallel=parallel) for rule in (split, greedy_split))
    assert sum(found.gb.values()) == pytest.approx(gb)
    assert all(found.gb[tier.name] <= tier.capacity_gb * (1 + 1e-9) for tier in tiers)
    assert found.seconds <= greedy.seconds * (1 + 1e-9)


def test_the_dual_is_what_one_more_gb_saves() -> None:
    more = msgspec.structs.replace(GPU, capacity_gb=11.0)
    before, after = (split(200.0, (gpu, HOST, DISK)) for gpu in (GPU, more))
    assert before.saved_s_per_gb["gpu"] == pytest.approx(before.seconds - after.seconds)
    assert before.saved_s_per_gb["host"] == 0.0


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="411 GB do not fit"):
        split(411.0, (GPU, HOST))
