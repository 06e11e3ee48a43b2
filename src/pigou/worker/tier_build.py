"""The tiers of a worker, as configured: sizes, policies and stores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pigou.config import ConfigError
from pigou.events import Medium
from pigou.kv.layout import KVLayout
from pigou.kv.move import staging_of
from pigou.kv.policies.policy import Setting, load
from pigou.kv.tier import Tier
from pigou.kv.tiers import Tiers
from pigou.kv.worth import Worth
from pigou.runtime.stores.device import Blocks, make_arena
from pigou.runtime.stores.disk import DiskStore
from pigou.runtime.stores.host import HostStore
from pigou.runtime.stores.mover import HOST, Mover
from pigou.runtime.stores.store import Store, StoreError
from pigou.worker.config import WorkerConfig

#: Of the device's blocks, the share that may be under copy at once, and the most there may be.
_COPIES, _MOST_COPIES = 2, 512
#: Rows for reading what does not go straight into the device.
_READS = 64
#: Seconds that a token of a prompt takes, and bytes that come back in a second, before they were
#: measured: what the prices of blocks begin with.
_TOKEN, _BACK = 1e-4, 1e9


@dataclass(frozen=True, slots=True)
class Plan:
    """How large everything is, in blocks.

    Attributes:
        rows: of host memory, all of them.
        copies: of those, for copies from the device under way.
        host: blocks of the host's store; 0 for no such tier.
    """

    rows: int
    copies: int
    host: int


@dataclass(frozen=True, slots=True)
class TierParts:
    """Tiers, the names of their stores, and what makes the mover, given the device's blocks."""

    tiers: Tiers
    names: list[str]
    mover: Callable[[Blocks], Mover]


def plan_host(config: WorkerConfig, layout: KVLayout, blocks: int) -> Plan:
    """Divide the host's memory; `blocks` is how many the device has.

    Raises:
        ConfigError: `host_cache` has no room for a block besides those under way.
    """
    far = bool(config.disk_cache) + bool(config.bucket_cache)
    reads = _READS if far > 1 or (far and config.device != "cpu") else 0
    copies = max(1, min(blocks // _COPIES, _MOST_COPIES))
    if not config.host_cache:
        return Plan(copies + reads, copies, 0)
    rows = config.host_cache // layout.block_bytes
    copies = min(copies, max(1, rows // 4))
    host = rows - copies - reads
    if host < 2:
        raise ConfigError(
            f"host_cache is {config.host_cache} bytes; blocks of {layout.block_bytes} bytes need "
            f"at least {(copies + reads + 2) * layout.block_bytes}"
        )
    return Plan(rows, copies, host)


def build_tiers(config: WorkerConfig, layout: KVLayout, blocks: int) -> TierParts | None:
    """Make the tiers that are configured, and open their stores; None where there are none.

    Raises:
        ConfigError: a size that holds nothing, an unknown policy, a place that cannot be used.
    """
    if not config.tiered:
        return None
    plan = plan_host(config, layout, blocks)
    stores = _stores(config, layout)
    rooms = {HOST: plan.host} if plan.host else {}
    rooms |= {name: store.capacity for name, store in stores.items()}
    names = list(rooms)
    staging = staging_of(list(rooms.values()))
    tiers = [
        _tier(config, layout, name, rooms[name] - spare)
        for name, spare in zip(names, staging, strict=True)
    ]
    media = [Medium.HOST if name == HOST else Medium.STORAGE for name in names]
    made = Tiers(tiers, layout.block_bytes, staging, copies=plan.copies, media=media)
    made.recall = config.tier_recall
    return TierParts(made, names, lambda device: _mover(device, plan, stores))


def _stores(config: WorkerConfig, layout: KVLayout) -> dict[str, Store]:
    space = bytes.fromhex(layout.fingerprint())
    stores: dict[str, Store] = {}
    try:
        if config.disk_cache:
            stores["disk"] = DiskStore(
                Path(config.disk_path), space, layout.block_bytes, config.disk_cache
            )
        if config.bucket_cache:
            stores["bucket"] = _bucket(config, layout, space)
    except (StoreError, ValueError) as error:
        raise ConfigError(f"a cache beyond the device cannot be used: {error}") from None
    return stores


def _bucket(config: WorkerConfig, layout: KVLayout, space: bytes) -> Store:
    from pigou.runtime.stores.bucket import BucketStore  # its client is not small
    from pigou.runtime.stores.location import Location

    location = Location(config.bucket_url, config.bucket_endpoint, config.bucket_region)
    return BucketStore(location, space, layout.block_bytes, config.bucket_cache)


def _tier(config: WorkerConfig, layout: KVLayout, name: str, room: int) -> Tier:
    if room < 1:
        raise ConfigError(
            f"{name}_cache is {getattr(config, f'{name}_cache')} bytes; blocks of "
            f"{layout.block_bytes} bytes need at least {2 * layout.block_bytes + 512}"
        )
    cap = room * layout.block_bytes
    worth = Worth(base=layout.block_size * _TOKEN, restore=1 / _BACK)
    return Tier(cap, load(config.tier_policy, Setting(cap, worth), config.tier_params))


def _mover(device: Blocks, plan: Plan, stores: dict[str, Store]) -> Mover:
    return Mover(device, HostStore(make_arena(device, plan.rows), plan.host), stores)
