"""Quotas of KV blocks reach workers, and hold there against a flood, also after a restart."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from tests.e2e.conftest import SLEEP
from tests.e2e.fleet import Fleet
from tests.e2e.tenants import Tenants

from pigou.wire.fleet_secret import tenant_mark

_QUICK = ("--sleep-base", "1000000", "--sleep-prefill-rate", "1000000")
_PROMPT = list(range(100, 380))


def test_a_floor_keeps_the_cache_of_a_flooded_tenant(
    start_fleet: Callable[..., Fleet], tmp_path: Path
) -> None:
    tenants = Tenants.make(tmp_path)
    gateway = {"api_keys_file": str(tenants.file), "kv_quotas": ("one=0.5:1",)}
    fleet = start_fleet(["both-0"], *SLEEP, *_QUICK, "--blocks", "64", gateway=gateway)
    fleet.headers = {"authorization": f"Bearer {tenants.one}"}
    assert _hits_after_a_flood(fleet, tenants) == 17 * 16
    pid = fleet.signal("both-0")
    fleet.recovered([pid])
    _await_quota(fleet)
    assert _hits_after_a_flood(fleet, tenants) == 17 * 16
    assert fleet.metric("pigou_worker_kv_quotas", worker="both-0") == 1
    fleet.stop(files=False)


def test_a_floor_of_a_disk_holds_against_a_flood_also_after_a_restart(
    start_fleet: Callable[..., Fleet], tmp_path: Path
) -> None:
    tenants = Tenants.make(tmp_path)
    gateway = {"api_keys_file": str(tenants.file), "kv_quotas": ("one=0.5:1",)}
    disk = ("--tier", f"disk=256KiB@{tmp_path}/disk,policy=lru", "--blocks", "64")
    fleet = start_fleet(["both-0"], *SLEEP, *_QUICK, *disk, gateway=gateway)
    fleet.headers = {"authorization": f"Bearer {tenants.one}"}
    _await_quota(fleet)
    fleet.complete(prompt=_PROMPT, max_tokens=1)
    size = 17 * 4096  # 1 layer, 2 heads, 16 numbers, keys and values, 4 bytes: 4 KiB a block
    _await_bytes(fleet, size)
    pid = fleet.signal("both-0")
    fleet.recovered([pid])
    _await_quota(fleet)
    _await_bytes(fleet, size)
    _flood(fleet, tenants)
    _await_bytes(fleet, size, evicted=100)
    fleet.stop(files=False)


def _await_bytes(fleet: Fleet, size: int, evicted: int = 0, seconds: float = 30) -> None:
    """Wait until the disk evicted so many blocks, and tenant `one` has its bytes there."""
    end, worker, held, gone = time.monotonic() + seconds, fleet.worker("both-0"), -1.0, -1.0
    while held != size or gone < evicted:
        assert time.monotonic() < end, (held, gone)
        time.sleep(0.05)
        held = worker.metric("pigou_tier_tenant_bytes", tenant=tenant_mark("one"))
        gone = worker.metric("pigou_tier_evicted_blocks_total")


def _hits_after_a_flood(fleet: Fleet, tenants: Tenants) -> int:
    """Return the cached tokens of a prompt of 17 blocks after 16 others of another tenant."""
    fleet.complete(prompt=_PROMPT, max_tokens=1)
    _flood(fleet, tenants)
    usage = fleet.complete(prompt=_PROMPT, max_tokens=1)["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def _flood(fleet: Fleet, tenants: Tenants) -> None:
    mine, fleet.headers = fleet.headers, {"authorization": f"Bearer {tenants.other}"}
    for first in range(400, 416):
        fleet.complete(prompt=[first, *_PROMPT], max_tokens=1)
    fleet.headers = mine


def _await_quota(fleet: Fleet, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while (fleet.rows()["both-0"]["limits"] or {}).get("kv_quotas") != 1:
        assert time.monotonic() < end, fleet.rows()
        time.sleep(0.05)
