"""A healthy tenant's streams, while everything else attacks."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import pytest
from tests.hostile.fleets import FLEETS, ROOT, Fleet, serving
from tests.hostile.run import ATTACKS
from tests.hostile.tenant import AFTER, QUIET, Tenant

#: Seconds; the least ITL P99 that counts as too long, and the most an attack may take.
LIMIT_S, ATTACK_S = 0.1, 60.0
TIMES = 3
#: Bytes that the gateway may need more during an attack than before.
MEMORY_BYTES = 640 * 2**20


def test_every_family_of_attacks_has_a_fleet() -> None:
    families = [family for _, families in FLEETS.values() for family in families]
    assert sorted(families) == sorted({name.partition(".")[0] for name in ATTACKS})


@pytest.mark.slow
@pytest.mark.parametrize("fleet", list(FLEETS))
def test_attacks_cost_a_healthy_tenant_no_stream_no_worker_and_little_time(
    fleet: str, tmp_path: Path
) -> None:
    if fleet == "model":
        pytest.importorskip("torch")
    asyncio.run(_attack_all(fleet, tmp_path))


async def _attack_all(name: str, folder: Path) -> None:
    began = time.monotonic()
    async with serving(name, folder) as fleet:
        print(f"\n{name}: serves after {time.monotonic() - began:.1f} s", flush=True)
        pids, tenant = fleet.workers(), Tenant(fleet.url, fleet.healthy)
        assert bool(pids) is (name not in ("attached", "still", "registered", "queued"))
        streaming = asyncio.create_task(tenant.run())
        await asyncio.sleep(3)
        broken = [await _attack(each, fleet, tenant) for each in _attacks(name)]
        tenant.over = True
        await streaming
        slow = _report(tenant)
        log = fleet.log.read_text()[-3000:]
        assert [each for each in broken if each] == [], log
        assert tenant.faults == [], log
        assert fleet.workers() == pids, log
        assert slow == []


def _attacks(fleet: str) -> list[str]:
    return [name for name in ATTACKS if name.partition(".")[0] in FLEETS[fleet][1]]


async def _attack(name: str, fleet: Fleet, tenant: Tenant) -> str:
    """Attack, and let it become quiet; return what was wrong, empty for nothing."""
    tenant.phase, began, before = name, time.monotonic(), fleet.memory()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.hostile.run", name, fleet.url, fleet.attacker, cwd=ROOT,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(ATTACK_S):
            _, errors = await process.communicate()
    except TimeoutError:
        process.kill()
        errors = b"it never ended"
    tenant.phase = AFTER
    await asyncio.sleep(0.3)
    fault = await _sick(fleet)
    if process.returncode:
        fault = errors.decode().strip().rpartition("\n")[2]
    peak = fleet.memory() - before
    if peak > MEMORY_BYTES:
        fault += f" the gateway took {peak / 2**20:.0f} MB more"
    gaps = tenant.gaps.get(name) or [float("inf")]
    took_s, worst_ms = time.monotonic() - began, 1e3 * max(gaps)
    print(f"  {name}: {took_s:.1f} s, {len(gaps)} tokens, worst {worst_ms:.0f} ms, "
          f"{peak / 2**20:+.0f} MB {fault}", flush=True)  # fmt: skip
    tenant.phase = QUIET
    await asyncio.sleep(0.7)
    return f"{name}: {fault}" if fault else ""


async def _sick(fleet: Fleet) -> str:
    """Return which workers are not up, or were restarted, and which tasks fail."""
    view = await fleet.view()
    sick = [f"{row['id']} is {row['state']}, {row['restarts']} restarts"
            for row in view["workers"] if row["state"] != "up" or row["restarts"]]  # fmt: skip
    sick += [f"{task['name']}: {task['error']}" for task in view["background"]
             if task["state"] != "running" or task["restarts"]]  # fmt: skip
    return "; ".join(sick)


def _report(tenant: Tenant) -> list[str]:
    """Print the figures; return the attacks during which tokens came too late."""
    quiet = tenant.p99_s(QUIET)
    limit = max(TIMES * quiet, LIMIT_S)
    tenant.gaps.pop(AFTER, None)
    streams = f"{tenant.streams} streams, {len(tenant.faults)} lost"
    print(
        f"  {streams}; ITL P99 quiet {1e3 * quiet:.1f} ms, limit {1e3 * limit:.1f} ms", flush=True
    )
    p99_s = {name: tenant.p99_s(name) for name in tenant.gaps if name != QUIET}
    for name, value in p99_s.items():
        print(f"    {name}: {1e3 * value:.1f} ms", flush=True)
    return [f"{name}: {1e3 * value:.1f} ms" for name, value in p99_s.items() if value > limit]
