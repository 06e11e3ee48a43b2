"""The tiers of a worker: what the core decides is done by a mover, and answered with commands."""

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
        """Work for a core. `put`: sends a command to the engine thread; called from any thread."""
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

        `wait`: seconds until the core takes note of a read's end, mostly: the steps' ends.
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
class WorkerTiers:
    """Tiers with open stores; `offloader` starts what moves blocks there."""

    tiers: Tiers
    names: list[str]  # of the tiers, nearest first
    stores: dict[str, Store]  # all but the host's, by name
    host: HostMemory

    def offloader(self, device: DeviceBlocks) -> KVOffloader:
        """Start to move blocks between a device and the stores."""
        store = HostStore(make_arena(device, self.host.rows), self.host.blocks)
        return KVOffloader(device, store, self.stores)


@dataclass(frozen=True, slots=True)
class HostMemory:
    """How host memory is divided, in blocks."""

    rows: int  # all of it
    copies: int  # under way from the device
    blocks: int  # of the host tier; 0 without one


def divide_host_memory(config: WorkerConfig, layout: KVLayout, blocks: int) -> HostMemory:
    """Divide the host's memory for a device of `blocks` blocks.

    Raises ConfigError: the host tier has no room for a block besides those under way.
    """
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
    """Make the tiers that are configured, and open their stores; None where there are none.

    Raises ConfigError: a size that holds nothing, an unknown policy, a place that cannot be used.
    """
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
