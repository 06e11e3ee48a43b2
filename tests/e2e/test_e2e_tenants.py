"""No tenant or tenure hits another's cache, on workers of our own."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.e2e.conftest import REAL, SLEEP
from tests.e2e.fleet import Fleet, worker
from tests.e2e.tenants import (
    APART,
    Tenants,
    assert_apart,
    assert_expiring,
    assert_isolated,
    assert_none_crosses,
    assert_random_apart,
)


@pytest.mark.parametrize(
    "roles",
    [("prefill-0", "decode-0"), pytest.param(("both-0", "both-1"), marks=pytest.mark.slow)],
)
def test_no_prefix_hit_crosses_tenants(
    roles: tuple[str, ...], checkpoint: Path, tmp_path: Path
) -> None:
    tenants = Tenants.make(tmp_path)
    fleet = Fleet.start(
        tmp_path / "log",
        [worker(name, checkpoint, *REAL) for name in roles],
        gateway={"api_keys_file": str(tenants.file)},
    )
    try:
        headers = {"authorization": f"Bearer {tenants.one}"}
        rows = fleet.call("GET", "/workers", headers=headers).json["workers"]
        assert_isolated(fleet.url, tenants, [row["url"] for row in rows], 16)
    finally:
        fleet.stop()


@pytest.mark.parametrize(
    "roles", [("prefill-0", "decode-0"), pytest.param(("both-0",), marks=pytest.mark.slow)]
)
def test_each_tenure_hits_its_own_blocks_alone(
    roles: tuple[str, ...], checkpoint: Path, tmp_path: Path
) -> None:
    tenants, journal = Tenants.granted(tmp_path), tmp_path / "journal"
    fleet = Fleet.start(
        tmp_path / "log",
        [worker(name, checkpoint, *REAL) for name in roles],
        gateway={"api_keys_file": str(tenants.file), "journal": str(journal)},
    )
    try:
        headers = {"authorization": f"Bearer {tenants.one}"}
        rows = fleet.call("GET", "/workers", headers=headers).json["workers"]
        urls = [row["url"] for row in rows]
        assert_apart(fleet.url, tenants, urls, 16)
        assert_expiring(fleet.url, tenants, urls, 16)
    finally:
        fleet.stop()
    written = journal.read_text()
    assert written.count('"kind":"submit"') >= 2 * len(APART)
    assert "tenure1" not in written


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_no_tier_below_the_device_hits_across_tenures(
    tier: str, checkpoint: Path, tmp_path: Path
) -> None:
    """The device has room for half of the tenures, the tier for all."""
    tenants = Tenants.granted(tmp_path)
    below = {
        "host": ("--tier", "host=4MiB"),
        "disk": ("--tier", f"disk=4MiB@{tmp_path / 'kv'}"),
    }
    quick = ("--sleep-base", "1000000", "--sleep-prefill-rate", "20000")
    both = worker("both-0", checkpoint, *SLEEP, *below[tier], *quick)
    both["arguments"][both["arguments"].index("--blocks") + 1] = "64"
    gateway = {"api_keys_file": str(tenants.file)}
    fleet = Fleet.start(tmp_path / "log", [both], gateway=gateway)
    try:
        headers = {"authorization": f"Bearer {tenants.one}"}
        rows = fleet.call("GET", "/workers", headers=headers).json["workers"]
        urls = [row["url"] for row in rows]
        assert assert_none_crosses(fleet.url, tenants, urls, 16, tiers=True) > len(APART) / 2
        assert_expiring(fleet.url, tenants, urls, 16, tiers=True)
    finally:
        fleet.stop()


def test_pairs_of_random_tenures_hit_exactly_where_they_are_equal(
    checkpoint: Path, tmp_path: Path
) -> None:
    fleet = Fleet.start(tmp_path / "log", [worker("both-0", checkpoint, *REAL)])
    try:
        assert_random_apart(fleet.url, [fleet.worker("both-0").url], 16, 60)
    finally:
        fleet.stop()
