"""The tiers of a worker: what the core decides is done by a mover, and answered with commands."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pigou.config import ConfigError
from pigou.engine.plan import Load
from pigou.events import Medium
from pigou.kv.block import Block, KVLayout, hashes_of
from pigou.kv.offload import DEVICE, NOWHERE, Move, RecomputeCost, TierSpeed, staging_of
from pigou.kv.tier import Tier
from pigou.kv.tier_eviction.policy import TierSetting, load
from pigou.kv.tiers import Tiers
from pigou.request import Ints
from pigou.runtime.kv_offload.disk_store import DiskStore
from pigou.runtime.kv_offload.host_store import HostStore
from pigou.runtime.kv_offload.offloader import DEVICE as DEVICE_NAME
from pigou.runtime.kv_offload.offloader import HOST, KVOffloader, StoreStatus
from pigou.runtime.kv_offload.records import BlockRecords
from pigou.runtime.kv_offload.store import Store, StoreError
from pigou.runtime.kv_offload.transfer_jobs import DeviceBlocks, make_arena
from pigou.runtime.kv_offload.transfer_queue import OffloadResult
from pigou.worker.commands import Command, OffloadDone, Recovered, Restored
from pigou.worker.config import WorkerConfig

log = logging.getLogger(__name__)

#: Nanoseconds for which a speed is not asked again.
_FRESH = 20_000_000


class OffloadConnector:
    """Makes the moves of one core; called from the engine thread, but for what says otherwise."""

    def __init__(
        self,
        tiers: Tiers,
        names: Sequence[str],
        offloader: KVOffloader,
        put: Callable[[Command], None],
    ) -> None:
        """Work for a core.

        Args:
            names: of their stores, in the same order.
            put: sends a command to the engine thread; called from any thread.
        """
        self.tiers = tiers
        self.names = list(names)
        self._offloader = offloader
        self._put = put
        self._measured = -_FRESH
        self._bytes = offloader.stores[HOST].block_bytes

    def recover(self) -> None:
        """Ask every store what it still has."""
        for tier, name in enumerate(self.names):

            def on_survey(entries: BlockRecords | None, tier: int = tier) -> None:
                if entries is not None and len(entries):
                    self._put(Recovered(tier, entries.blocks(self._bytes)))

            self._offloader.survey(name, on_survey)

    def recovered(self, tier: int, blocks: list[Block]) -> None:
        """Take note of blocks that a store has from before the start."""
        count = self.tiers.recover(tier, blocks, time.time_ns())
        log.info("tier %d has %d blocks from before the start, %d of use", tier, len(blocks), count)

    def measure(self, wait: float) -> None:
        """Tell the tiers how fast they are now; one whose store is down cannot be read.

        Args:
            wait: seconds until the core takes note of a read's end, mostly: the steps' ends.
        """
        now = time.monotonic_ns()
        if now - self._measured < _FRESH:
            return
        self._measured = now
        for tier, (name, status) in enumerate(self.status().items()):
            if not status.reads.up:
                self.tiers.speeds[tier] = TierSpeed(math.inf, math.inf)
                continue
            latency = self._offloader.seconds(name, DEVICE_NAME, 0)  # with what is queued
            self.tiers.speeds[tier] = TierSpeed(latency + wait, self._offloader.law(name)[1])

    # --- moves ----------------------------------------------------------------------------------

    def make(self, moves: Sequence[Move]) -> None:
        """Begin moves; an `OffloadDone` command answers each that has a number."""
        for move in moves:
            if move.target == NOWHERE:
                self._offloader.delete(self.names[move.source], hashes_of(move.keys))
                continue
            entries, target = BlockRecords.of(move.blocks), self.names[move.target]
            if move.source == DEVICE:
                taken = self._offloader.demote(move.device, entries, target, self._answer(move))
            else:
                source = self.names[move.source]
                taken = self._offloader.move(entries, source, target, self._answer(move))
            if not taken:
                self._put(OffloadDone(move.number, [False] * len(move.keys)))

    def _answer(self, move: Move) -> Callable[[OffloadResult], None]:
        def moved(result: OffloadResult) -> None:
            self._put(OffloadDone(move.number, result.good.tolist()))

        return moved

    # --- restores -------------------------------------------------------------------------------

    def restore(self, load: Load) -> None:
        """Fill a load's blocks; one `Restored` command follows, for the leading ones that came."""
        tiers = np.unique(load.tiers).tolist()
        restore = _Restore(load, len(tiers), self._put)
        for tier in tiers:
            index = np.flatnonzero(load.tiers == tier).astype(np.int32)
            name, keys = self.names[tier], load.hashes[index]
            done = restore.part(index)
            if not self._offloader.restore(keys, name, load.blocks[index], done):
                done(OffloadResult(np.zeros(len(index), dtype=np.bool_), "refused", 0))

    # --- figures --------------------------------------------------------------------------------

    def status(self) -> dict[str, StoreStatus]:
        """Describe each tier's store, by name; from any thread."""
        statuses = self._offloader.status()
        return {name: statuses[name] for name in self.names}

    def close(self) -> None:
        """Finish what is queued, within limits; close the stores."""
        self._offloader.close()


class _Restore:
    """A load whose blocks come from several stores; answered when all have been heard of."""

    def __init__(self, load: Load, parts: int, put: Callable[[Command], None]) -> None:
        self._request, self._put = load.request, put
        self._good = np.zeros(len(load.tiers), dtype=np.bool_)
        self._failed = np.zeros(len(load.tiers), dtype=np.bool_)
        self._left = parts
        self._lock = threading.Lock()

    def part(self, index: Ints) -> Callable[[OffloadResult], None]:
        """Return what takes the answer for the blocks at `index`, on whatever thread."""

        def done(moved: OffloadResult) -> None:
            with self._lock:
                self._good[index] = moved.good
                self._failed[index] = bool(moved.reason)
                self._left -= 1
                if self._left:
                    return
            whole = bool(self._good.all())
            good = len(self._good) if whole else int(self._good.argmin())
            self._put(Restored(self._request, good, not whole and bool(self._failed[good])))

        return done


#: Of the device's blocks, the share that may be under copy at once, and the most there may be.
_COPIES, _MAX_COPIES = 2, 512
#: Rows for reading what does not go straight into the device.
_READS = 64
#: Seconds that a token of a prompt takes, and bytes that come back in a second, before they were
#: measured: what the prices of blocks begin with.
_TOKEN, _BACK = 1e-4, 1e9


@dataclass(frozen=True, slots=True)
class HostMemoryPlan:
    """How large everything is, in blocks."""

    rows: int
    copies: int
    host: int  # blocks of the host's store; 0 for no such tier


@dataclass(frozen=True, slots=True)
class TierParts:
    """Tiers, the names of their stores, and what makes the mover, given the device's blocks."""

    tiers: Tiers
    names: list[str]
    offloader: Callable[[DeviceBlocks], KVOffloader]


def plan_host(config: WorkerConfig, layout: KVLayout, blocks: int) -> HostMemoryPlan:
    """Divide the host's memory; `blocks` is how many the device has.

    Raises:
        ConfigError: `host_cache` has no room for a block besides those under way.
    """
    far = bool(config.disk_cache) + bool(config.bucket_cache)
    reads = _READS if far > 1 or (far and config.device != "cpu") else 0
    copies = max(1, min(blocks // _COPIES, _MAX_COPIES))
    if not config.host_cache:
        return HostMemoryPlan(copies + reads, copies, 0)
    rows = config.host_cache // layout.block_bytes
    copies = min(copies, max(1, rows // 4))
    host = rows - copies - reads
    if host < 2:
        raise ConfigError(
            f"host_cache is {config.host_cache} bytes; blocks of {layout.block_bytes} bytes need "
            f"at least {(copies + reads + 2) * layout.block_bytes}"
        )
    return HostMemoryPlan(rows, copies, host)


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
    return TierParts(made, names, lambda device: _offloader(device, plan, stores))


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
    from pigou.runtime.kv_offload.bucket_location import BucketLocation
    from pigou.runtime.kv_offload.bucket_store import BucketStore  # its client is not small

    location = BucketLocation(config.bucket_url, config.bucket_endpoint, config.bucket_region)
    return BucketStore(location, space, layout.block_bytes, config.bucket_cache)


def _tier(config: WorkerConfig, layout: KVLayout, name: str, room: int) -> Tier:
    if room < 1:
        raise ConfigError(
            f"{name}_cache is {getattr(config, f'{name}_cache')} bytes; blocks of "
            f"{layout.block_bytes} bytes need at least {2 * layout.block_bytes + 512}"
        )
    cap = room * layout.block_bytes
    recompute_cost = RecomputeCost(base=layout.block_size * _TOKEN, restore=1 / _BACK)
    return Tier(cap, load(config.tier_policy, TierSetting(cap, recompute_cost), config.tier_params))


def _offloader(device: DeviceBlocks, plan: HostMemoryPlan, stores: dict[str, Store]) -> KVOffloader:
    return KVOffloader(device, HostStore(make_arena(device, plan.rows), plan.host), stores)
