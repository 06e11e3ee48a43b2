"""No tenant hits another's cache, on workers of our own."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.e2e.conftest import REAL
from tests.e2e.fleet import Fleet, worker
from tests.e2e.tenants import Tenants, assert_isolated


@pytest.mark.parametrize("roles", [("prefill-0", "decode-0"), ("both-0", "both-1")])
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
