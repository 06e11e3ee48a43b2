"""No tenant or tenure hits another's cache, on real vLLM servers behind the gateway."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.e2e.fleet import Fleet
from tests.e2e.tenants import (
    Tenants,
    assert_apart,
    assert_expiring,
    assert_isolated,
    assert_random_apart,
)

if TYPE_CHECKING:
    from tests.peers.conftest import VllmWorker

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]


def test_no_prefix_hit_crosses_tenants(vllm_plain_two: list[VllmWorker], tmp_path: Path) -> None:
    tenants = Tenants.make(tmp_path)
    urls = [each.url for each in vllm_plain_two]
    fleet = Fleet.start(tmp_path / "log", attach=urls, gateway={"api_keys_file": str(tenants.file)})
    try:
        assert_isolated(fleet.url, tenants, urls, vllm_plain_two[0].block_size)
    finally:
        fleet.stop()


def test_each_tenure_hits_its_own_blocks_alone(
    vllm_plain_two: list[VllmWorker], tmp_path: Path
) -> None:
    tenants = Tenants.granted(tmp_path)
    urls, block = [each.url for each in vllm_plain_two], vllm_plain_two[0].block_size
    fleet = Fleet.start(tmp_path / "log", attach=urls, gateway={"api_keys_file": str(tenants.file)})
    try:
        assert_apart(fleet.url, tenants, urls, block)
        assert_expiring(fleet.url, tenants, urls, block)
    finally:
        fleet.stop()


def test_pairs_of_random_tenures_hit_exactly_where_they_are_equal(
    vllm_plain_two: list[VllmWorker], tmp_path: Path
) -> None:
    first = vllm_plain_two[0]
    fleet = Fleet.start(tmp_path / "log", attach=[first.url])
    try:
        assert_random_apart(fleet.url, [first.url], first.block_size, 250)
    finally:
        fleet.stop()
