"""Quotas of KV blocks reach workers, and hold there against a flood, also after a restart."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from tests.e2e.conftest import SLEEP
from tests.e2e.fleet import Fleet
from tests.e2e.tenants import Tenants

_QUICK = ("--sleep-base", "1000000", "--sleep-prefill-rate", "1000000")


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


def _hits_after_a_flood(fleet: Fleet, tenants: Tenants) -> int:
    """Return the cached tokens of a prompt of 17 blocks after 16 others of another tenant."""
    prompt, mine = list(range(100, 380)), fleet.headers
    fleet.complete(prompt=prompt, max_tokens=1)
    fleet.headers = {"authorization": f"Bearer {tenants.other}"}
    for first in range(400, 416):
        fleet.complete(prompt=[first, *prompt], max_tokens=1)
    fleet.headers = mine
    usage = fleet.complete(prompt=prompt, max_tokens=1)["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def _await_quota(fleet: Fleet, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while (fleet.rows()["both-0"]["limits"] or {}).get("kv_quotas") != 1:
        assert time.monotonic() < end, fleet.rows()
        time.sleep(0.05)
