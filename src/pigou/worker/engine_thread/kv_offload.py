"""Connects the core's tiers to a KVOffloader."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pigou.config import ConfigError
from pigou.engine.plan import Load
from pigou.kv.block import Block, KVLayout, hashes_of
from pigou.kv.offload import DEVICE, NOWHERE, Move, RecomputeCost, TierSpeed
from pigou.kv.tier_config import HOST, STORES, build_tiers
from pigou.kv.tiers import Tiers
from pigou.registry import named
from pigou.request import Ints
from pigou.runtime.stores.host_store import HostStore
from pigou.runtime.stores.offloader import DEVICE as DEVICE_NAME
from pigou.runtime.stores.offloader import KVOffloader, StoreStatus, make_arena
from pigou.runtime.stores.store import BlockRecords, DeviceBlocks, OpenStore, Store, StoreError
from pigou.runtime.stores.transfer_queue import OffloadResult
from pigou.worker.config import WorkerConfig
from pigou.worker.engine_thread.commands import Command, OffloadDone, Recovered, Restored

log = logging.getLogger(__name__)

#: Nanoseconds for which a measured speed is reused.
_FRESH = 20_000_000
#: Max blocks under copy at once: this fraction of the device's (a divisor), and an upper bound.
_COPIES, _MAX_COPIES = 2, 512
#: Staging rows for reads.
_READS = 64
#: Initial seconds per prompt token and restore bytes/s, for block prices until measured.
_TOKEN, _BACK = 1e-4, 1e9


class OffloadConnector:
    """Executes the moves of one core; called from the engine thread unless noted."""

    def __init__(
        self, tiers: Tiers, names: Sequence[str], offloader: KVOffloader,
        put: Callable[[Command], None],
    ) -> None:  # fmt: skip
        """Serve a core; `put` sends commands to the engine thread, from any thread."""
        self.tiers = tiers
        self.names = list(names)
        self._offloader = offloader
        self._put = put
        self._measured = -_FRESH
        self._bytes = offloader.stores[HOST].block_bytes

    def recover(self) -> None:
        """Ask every store for its surviving blocks."""
        for tier, name in enumerate(self.names):

            def on_survey(entries: BlockRecords | None, tier: int = tier) -> None:
                if entries is not None and len(entries):
                    self._put(Recovered(tier, entries.blocks(self._bytes)))

            self._offloader.survey(name, on_survey)

    def recovered(self, tier: int, blocks: list[Block]) -> None:
        """Register surviving blocks of a store."""
        count = self.tiers.recover(tier, blocks, time.time_ns())
        log.info("tier %d has %d blocks from before the start, %d of use", tier, len(blocks), count)

    def measure(self, wait: float) -> None:
        """Update the tiers' speeds; `wait` is the mean delay until the core sees a read."""
        now = time.monotonic_ns()
        if now - self._measured < _FRESH:
            return
        self._measured = now
        for tier, (name, status) in enumerate(self.status().items()):
            if not status.reads.up:
                self.tiers.speeds[tier] = TierSpeed(math.inf, math.inf)
                continue
            latency = self._offloader.seconds(name, DEVICE_NAME, 0)  # queueing included
            self.tiers.speeds[tier] = TierSpeed(latency + wait, self._offloader.law(name)[1])

    # --- moves ----------------------------------------------------------------------------------

    def make(self, moves: Sequence[Move]) -> None:
        """Start moves; an `OffloadDone` command answers each numbered one."""
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
        """Fill a load's blocks; one `Restored` command reports the leading ones that came."""
        tiers = np.unique(load.tiers).tolist()
        restore = _Restore(load, len(tiers), self._put)
        for tier in tiers:
            index = np.flatnonzero(load.tiers == tier).astype(np.int32)
            name, keys = self.names[tier], load.hashes[index]
            done = restore.part(index)
            if not self._offloader.restore(keys, name, load.blocks[index], done):
                done(OffloadResult(np.zeros(len(index), dtype=np.bool_), "refused"))

    # --- figures --------------------------------------------------------------------------------

    def status(self) -> dict[str, StoreStatus]:
        """Return each store's status by name; thread-safe."""
        statuses = self._offloader.status()
        return {name: statuses[name] for name in self.names}

    def close(self) -> None:
        """Drain the queues within limits, and close the stores."""
        self._offloader.close()


class _Restore:
    """A load from several stores; answered once all have reported."""

    def __init__(self, load: Load, parts: int, put: Callable[[Command], None]) -> None:
        self._request, self._put = load.request, put
        self._good = np.zeros(len(load.tiers), dtype=np.bool_)
        self._failed = np.zeros(len(load.tiers), dtype=np.bool_)
        self._left = parts
        self._lock = threading.Lock()

    def part(self, index: Ints) -> Callable[[OffloadResult], None]:
        """Return the callback for the blocks at `index`; thread-safe."""

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


@dataclass(frozen=True, slots=True)
class WorkerTiers:
    """Tiers with open stores."""

    tiers: Tiers
    names: list[str]  # nearest first
    stores: dict[str, Store]  # except the host store, by name
    host: HostMemory

    def offloader(self, device: DeviceBlocks) -> KVOffloader:
        """Start an offloader between a device and the stores."""
        store = HostStore(make_arena(device, self.host.rows), self.host.blocks)
        return KVOffloader(device, store, self.stores)


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Division of host memory, in blocks."""

    rows: int  # total
    copies: int  # staging of copies from the device
    blocks: int  # host tier


def divide_host_memory(config: WorkerConfig, layout: KVLayout, blocks: int) -> HostMemory:
    """Divide host memory for `blocks` device blocks; raises ConfigError if it is too small."""
    host = [tier for tier in config.tiers if tier.name == HOST]
    far = len(config.tiers) - len(host)
    reads = _READS if far > 1 or (far and config.device != "cpu") else 0
    copies = max(1, min(blocks // _COPIES, _MAX_COPIES))
    if not host:
        return HostMemory(copies + reads, copies, 0)
    rows = host[0].size_bytes // layout.block_bytes
    copies = min(copies, max(1, rows // 4))
    if rows - copies - reads < 2:
        raise ConfigError(
            f"tier {HOST} has {host[0].size_bytes} bytes; blocks of {layout.block_bytes} bytes "
            f"need at least {(copies + reads + 2) * layout.block_bytes}"
        )
    return HostMemory(rows, copies, rows - copies - reads)


def open_tiers(config: WorkerConfig, layout: KVLayout, blocks: int) -> WorkerTiers | None:
    """Open the configured tiers; None without any. Raises ConfigError on invalid settings."""
    if not config.tiers:
        return None
    host = divide_host_memory(config, layout, blocks)
    namespace = bytes.fromhex(layout.fingerprint())
    stores: dict[str, Store] = {}
    for tier in config.tiers:
        if tier.name == HOST:
            continue
        open_store: OpenStore = named(STORES, tier.name, "tier")
        try:
            stores[tier.name] = open_store(tier.uri, namespace, layout.block_bytes, tier.size_bytes)
        except (StoreError, ValueError) as error:
            raise ConfigError(f"tier {tier.name} cannot be used: {error}") from None
    names = [tier.name for tier in config.tiers]
    capacities = [host.blocks if name == HOST else stores[name].capacity for name in names]
    cost = RecomputeCost(base=layout.block_size * _TOKEN, restore=1 / _BACK)
    costs = [cost] * len(names)
    tiers = build_tiers(config.tiers, capacities, layout.block_bytes, costs, host.copies)
    tiers.recall = config.tier_recall
    return WorkerTiers(tiers, names, stores, host)
