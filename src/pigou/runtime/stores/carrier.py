"""Carrier: does with a mover what `pigou.kv.tiers.Tiers` decides."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from pigou.kv.block import Block
from pigou.kv.tiers import DEVICE, NOWHERE, Move, Speed
from pigou.request import BlockHashes, Ints
from pigou.runtime.stores.entries import Bools, Entries, hashes_of
from pigou.runtime.stores.link import Moved
from pigou.runtime.stores.mover import REFUSED, Mover


class Carrier:
    """Carries out moves, deletions and loads; tier i is the mover's store `names[i]`.

    Nothing waits: a move that is refused is answered at once, with no block there. Answers come on
    the threads of links, or on the caller's: whoever is told passes them to the engine's thread.
    """

    def __init__(
        self, mover: Mover, names: Sequence[str], landed: Callable[[int, list[bool]], None]
    ) -> None:
        """Carry with a mover.

        Args:
            mover: has the stores.
            names: of the tiers' stores, from the nearest on.
            landed: told the number of each move that has ended, and which blocks arrived.

        Raises:
            ValueError: a name is not that of a store.
        """
        if unknown := set(names) - set(mover.stores):
            raise ValueError(f"{sorted(unknown)[0]} is no store; there are {sorted(mover.stores)}")
        self._mover = mover
        self._names = list(names)
        self._landed = landed

    def carry(self, move: Move) -> None:
        """Begin a move, or a deletion."""
        if move.target == NOWHERE:
            self._mover.delete(self._names[move.source], hashes_of(move.keys))
            return

        def done(moved: Moved) -> None:
            self._landed(move.number, moved.good.tolist())

        entries = Entries.of(move.blocks)
        target = self._names[move.target]
        if move.source == DEVICE:
            taken = self._mover.demote(move.device, entries, target, done)
        else:
            taken = self._mover.move(entries, self._names[move.source], target, done)
        if not taken:
            self._landed(move.number, [False] * len(move.keys))

    def load(
        self, hashes: BlockHashes, tiers: Ints, blocks: Ints, done: Callable[[int], None]
    ) -> None:
        """Read consecutive blocks of a sequence into device blocks, from all tiers at once.

        Args:
            hashes: shape (n, 2), n at least 1.
            tiers: where each is read from, shape (n,).
            blocks: ids of the device blocks, shape (n,); they belong to the load until `done`.
            done: told once how many of the first blocks came.
        """
        parts = [np.flatnonzero(tiers == tier) for tier in np.unique(tiers)]
        gathered = _Gathered(len(hashes), len(parts), done)
        for index in parts:
            name = self._names[int(tiers[index[0]])]
            answer = gathered.part(index)
            if not self._mover.restore(hashes[index], name, blocks[index], answer):
                answer(Moved(np.zeros(len(index), dtype=np.bool_), REFUSED, 0))

    def speeds(self) -> list[Speed]:
        """How fast blocks come back from each tier, as measured."""
        return [Speed(*self._mover.law(name)) for name in self._names]

    def survey(self, tier: int, done: Callable[[list[Block] | None], None]) -> bool:
        """Ask a tier's store for what it holds, as blocks; None if it fails. False: it is down."""
        name = self._names[tier]
        size = self._mover.stores[name].record_bytes

        def end(entries: Entries | None) -> None:
            done(None if entries is None else entries.blocks(size))

        return self._mover.survey(name, end)


class _Gathered:
    """Answers to the parts of a load, which come in any order and on any thread."""

    def __init__(self, blocks: int, parts: int, done: Callable[[int], None]) -> None:
        self._good: Bools = np.zeros(blocks, dtype=np.bool_)
        self._left = parts
        self._done = done
        self._lock = threading.Lock()

    def part(self, index: NDArray[np.int64]) -> Callable[[Moved], None]:
        """Return what takes the answer for the blocks at `index`."""

        def answer(moved: Moved) -> None:
            with self._lock:
                self._good[index] = moved.good
                self._left -= 1
                last = not self._left
            if last:
                good = self._good
                self._done(len(good) if good.all() else int(np.argmin(good)))

        return answer
