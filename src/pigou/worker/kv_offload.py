"""The tiers of a worker: what the core decides is done by a mover, and answered with commands."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from pigou.engine.plan import Load
from pigou.kv.block import Block, hashes_of
from pigou.kv.move import DEVICE, NOWHERE, Move, Speed
from pigou.kv.tiers import Tiers
from pigou.request import Ints
from pigou.runtime.stores.entries import Entries
from pigou.runtime.stores.link import Moved
from pigou.runtime.stores.mover import DEVICE as DEVICE_NAME
from pigou.runtime.stores.mover import HOST, Mover
from pigou.runtime.stores.status import StoreStatus
from pigou.worker.commands import Command, Landed, Recovered, Restored

log = logging.getLogger(__name__)

#: Nanoseconds for which a speed is not asked again.
_FRESH = 20_000_000


class WorkerTiers:
    """Makes the moves of one core; called from the engine thread, but for what says otherwise."""

    def __init__(
        self, tiers: Tiers, names: Sequence[str], mover: Mover, put: Callable[[Command], None]
    ) -> None:
        """Work for a core.

        Args:
            tiers: of the core.
            names: of their stores, in the same order.
            mover: that has the stores.
            put: sends a command to the engine thread; called from any thread.
        """
        self.tiers = tiers
        self.names = list(names)
        self._mover = mover
        self._put = put
        self._measured = -_FRESH
        self._bytes = mover.stores[HOST].block_bytes

    def recover(self) -> None:
        """Ask every store what it still has."""
        for tier, name in enumerate(self.names):

            def found(entries: Entries | None, tier: int = tier) -> None:
                if entries is not None and len(entries):
                    self._put(Recovered(tier, entries.blocks(self._bytes)))

            self._mover.survey(name, found)

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
                self.tiers.speeds[tier] = Speed(math.inf, math.inf)
                continue
            latency = self._mover.seconds(name, DEVICE_NAME, 0)  # with what is queued
            self.tiers.speeds[tier] = Speed(latency + wait, self._mover.law(name)[1])

    # --- moves ----------------------------------------------------------------------------------

    def make(self, moves: Sequence[Move]) -> None:
        """Begin moves; a `Landed` command answers each that has a number."""
        for move in moves:
            if move.target == NOWHERE:
                self._mover.delete(self.names[move.source], hashes_of(move.keys))
                continue
            entries, target = Entries.of(move.blocks), self.names[move.target]
            if move.source == DEVICE:
                taken = self._mover.demote(move.device, entries, target, self._answer(move))
            else:
                source = self.names[move.source]
                taken = self._mover.move(entries, source, target, self._answer(move))
            if not taken:
                self._put(Landed(move.number, [False] * len(move.keys)))

    def _answer(self, move: Move) -> Callable[[Moved], None]:
        def moved(result: Moved) -> None:
            self._put(Landed(move.number, result.good.tolist()))

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
            if not self._mover.restore(keys, name, load.blocks[index], done):
                done(Moved(np.zeros(len(index), dtype=np.bool_), "refused", 0))

    # --- figures --------------------------------------------------------------------------------

    def status(self) -> dict[str, StoreStatus]:
        """Describe each tier's store, by name; from any thread."""
        found = self._mover.status()
        return {name: found[name] for name in self.names}

    def close(self) -> None:
        """Finish what is queued, within limits; close the stores."""
        self._mover.close()


class _Restore:
    """A load whose blocks come from several stores; answered when all have been heard of."""

    def __init__(self, load: Load, parts: int, put: Callable[[Command], None]) -> None:
        self._request, self._put = load.request, put
        self._good = np.zeros(len(load.tiers), dtype=np.bool_)
        self._failed = np.zeros(len(load.tiers), dtype=np.bool_)
        self._left = parts
        self._lock = threading.Lock()

    def part(self, index: Ints) -> Callable[[Moved], None]:
        """Return what takes the answer for the blocks at `index`, on whatever thread."""

        def done(moved: Moved) -> None:
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
