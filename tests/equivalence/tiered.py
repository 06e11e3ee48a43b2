"""A side with tiers: host memory and a disk, whose moves are made when a script says so."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
from pair import Side

from pigou.config import EngineConfig
from pigou.engine.plan import Load, Plan, Rates
from pigou.kv.block import keys_of
from pigou.kv.offload import DEVICE, NOWHERE, Move
from pigou.kv.tier import Tier
from pigou.kv.tier_eviction.lru import LruEviction
from pigou.kv.tier_eviction.policy import TierSetting
from pigou.kv.tiers import Tiers
from pigou.runtime.models.load import LoadedModel
from pigou.runtime.stores.disk_store import DiskStore
from pigou.runtime.stores.host_store import HostStore
from pigou.runtime.stores.store import BlockRecords, Store, hashes_of


@dataclass(frozen=True)
class Pace:
    """How tiers work: what they have room for, and what becomes of their moves.

    Attributes:
        host: blocks of the first tier.
        disk: blocks of the second one.
        staging: blocks beyond the first tier's, on their way to the second.
        copies: device blocks under copy at once.
        ready: share of the moves and reads under way that are made in a turn.
        fails: share of these that fail, in part.
        seed: of the draws.
    """

    host: int = 6
    disk: int = 16
    staging: int = 2
    copies: int = 4
    ready: float = 1.0
    fails: float = 0.0
    seed: int = 0


class TieredSide(Side):
    """A side whose blocks go down to stores and come back, byte for byte, on no thread but ours.

    Attributes:
        restored: blocks that came back.
    """

    def __init__(self, model: LoadedModel, config: EngineConfig, rates: Rates | None, pace: Pace,
                 folder: Path) -> None:  # fmt: skip
        self._pace, self._folder = pace, folder
        self._random = Random(pace.seed)
        self._links: list[deque[Move]] = [deque(), deque()]
        self._reads: list[Load] = []
        self.restored = 0
        super().__init__(model, config, rates)

    def tiers(self, model: LoadedModel) -> Tiers:
        pace, layout = self._pace, model.layout(self.config.block_size)
        size = layout.block_bytes
        rows = pace.host + pace.staging
        host = HostStore(np.zeros((rows, size), dtype=np.uint8), rows)
        cap = pace.disk * (size + 128) + 128
        disk = DiskStore(self._folder, bytes.fromhex(layout.fingerprint()), size, cap)
        assert disk.capacity == pace.disk
        self.stores: list[Store] = [host, disk]
        caps = [pace.host * size, pace.disk * size]
        tiers = [Tier(cap, LruEviction(TierSetting(cap), LruEviction.Params())) for cap in caps]
        return Tiers(tiers, size, [pace.staging, 0], copies=pace.copies)

    def begin(self, plan: Plan) -> list[Load]:
        for move in plan.moves:
            self._links[move.source if move.target == NOWHERE else move.target].append(move)
        self._reads += [load for load in plan.loads if len(load.tiers)]
        self._turn(self._pace.ready, self._pace.fails)
        return [load for load in plan.loads if not len(load.tiers)]

    def settle(self) -> None:
        while self._idle() or self._reads or any(self._links):
            self._turn(1.0, 0.0)

    def close(self) -> None:
        for store in self.stores:
            store.close()

    def _idle(self) -> bool:
        """Plan while nobody computes; whether there was something to be moved."""
        self.clock += 1
        plan = self.core.schedule(self.clock)
        assert not plan
        assert not self.begin(plan)
        self.core.check_integrity()
        return bool(plan.moves or plan.loads)

    def _turn(self, ready: float, fails: float) -> None:
        """Make some of what is under way, each link's moves in order."""
        for link in self._links:
            while link and self._random.random() < ready:
                self._make(link.popleft(), self._random.random() < fails)
        for load in list(self._reads):
            if self._random.random() < ready:
                self._reads.remove(load)
                self._read(load, self._random.random() < fails)
        for store in self.stores:
            assert store.used_bytes <= store.cap_bytes

    def _make(self, move: Move, fails: bool) -> None:
        keys = hashes_of(move.keys)
        if move.target == NOWHERE:
            self.stores[move.source].delete(keys)
            return
        rows = np.arange(len(keys), dtype=np.int32)
        good = np.ones(len(keys), dtype=np.bool_)
        if move.source == DEVICE:
            data = self.cache.read(move.device)
        else:
            data = np.zeros((len(keys), self.stores[0].block_bytes), dtype=np.uint8)
            good = self.stores[move.source].get(keys, data, rows)
        if fails:
            good[self._random.randrange(len(good)) :] = False
        at = np.flatnonzero(good)
        good[at] = self.stores[move.target].put(
            BlockRecords.of(move.blocks).take(at), data, rows[at]
        )
        self.core.on_transfer_done(move.number, good.tolist())

    def _read(self, load: Load, fails: bool) -> None:
        count = self._random.randrange(len(load.blocks)) if fails else len(load.blocks)
        data = np.zeros((1, self.stores[0].block_bytes), dtype=np.uint8)
        done = 0
        while done < count:
            store = self.stores[int(load.tiers[done])]
            if not store.get(load.hashes[done : done + 1], data, np.zeros(1, dtype=np.int32))[0]:
                break
            self.cache.write(load.blocks[done : done + 1], data)
            done += 1
        assert done == count, f"{keys_of(load.hashes)[done].hex()} is not where it should be"
        self.restored += done
        self.core.loaded(load.request, done * self.config.block_size)
