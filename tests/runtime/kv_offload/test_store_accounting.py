"""A worker does what tiers decide: their books and the stores agree when nothing is under way."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from store_bench import NAMESPACE, SIZE, bytes_of, entries_of, keys_of, rows_of

from pigou.engine.plan import Load
from pigou.kv.block import KVLayout
from pigou.kv.block import keys_of as names_of
from pigou.kv.tier import Tier
from pigou.kv.tier_eviction.lru import LruEviction
from pigou.kv.tier_eviction.policy import TierSetting
from pigou.kv.tiers import Tiers
from pigou.request import NEVER, Ints
from pigou.runtime.stores.disk_store import DiskStore
from pigou.runtime.stores.host_store import HostStore
from pigou.runtime.stores.offloader import KVOffloader
from pigou.worker.engine_thread.commands import Command, OffloadDone, Recovered, Restored
from pigou.worker.engine_thread.kv_offload import OffloadConnector

BLOCKS = 24
ROUNDS = 60


class Device:
    """Blocks in an array."""

    layout = KVLayout("m", "d", "float32", 16, 1, 1, 4, SIZE)

    def __init__(self) -> None:
        self.data = np.zeros((BLOCKS, SIZE), dtype=np.uint8)

    def as_bytes(self) -> np.ndarray:
        return self.data

    read = write = None


class Stand:
    """A device, two tiers with their books, and what carries between them."""

    def __init__(self, path: Path) -> None:
        self.device = Device()
        host = HostStore(np.zeros((6 + 2 + 8, SIZE), dtype=np.uint8), 6 + 2)
        self.disk = DiskStore(path, NAMESPACE, SIZE, 12 * (SIZE + 128) + 128)
        self.mover = KVOffloader(self.device, host, {"disk": self.disk})  # type: ignore[arg-type]
        self.answers: queue.Queue[Command] = queue.Queue()
        caps = [6 * SIZE, 12 * SIZE]
        tiers = [Tier(cap, LruEviction(TierSetting(cap), LruEviction.Params())) for cap in caps]
        self.tiers = Tiers(tiers, SIZE, [2, 0])
        self.worker = OffloadConnector(self.tiers, ["host", "disk"], self.mover, self.answers.put)

    def carry(self) -> None:
        """Carry until nothing is left to be done."""
        while moves := self.tiers.drain():
            self.worker.make(moves)
            for _ in range(sum(move.number >= 0 for move in moves)):
                answer = self.answers.get(timeout=60)
                assert isinstance(answer, OffloadDone)
                self.tiers.on_transfer_done(answer.move, answer.good, 0)

    def load(self, numbers: list[int], tiers: Ints, blocks: Ints) -> int:
        self.worker.restore(Load("r", 0, 0, blocks, tiers, keys_of(numbers)))
        answer = self.answers.get(timeout=60)
        assert isinstance(answer, Restored)
        return answer.blocks


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[Stand]:
    made = Stand(tmp_path)
    yield made
    made.mover.close()


def offer(stand: Stand, numbers: list[int]) -> None:
    stand.device.data[: len(numbers)] = bytes_of(numbers)
    stand.tiers.use(keys_of(numbers), NEVER, 0)
    stand.tiers.offer(keys_of(numbers), rows_of(len(numbers)), NEVER, 0, 100)
    stand.carry()


def test_the_tiers_books_and_the_stores_agree(stand: Stand) -> None:
    rng = np.random.default_rng(1)
    chains = [list(range(100 * i, 100 * i + int(rng.integers(1, 7)))) for i in range(8)]
    restored = 0
    for _ in range(ROUNDS):
        offer(stand, chains[int(rng.integers(len(chains)))])
        for tier, name in enumerate(("host", "disk")):
            believed = {block.key for block in stand.tiers.tiers[tier].blocks()}
            assert believed == set(names_of(stand.mover.stores[name].entries().keys))
        wanted = chains[int(rng.integers(len(chains)))]
        tiers = stand.tiers.restorable(keys_of(wanted), 0, 0)
        if len(tiers):
            blocks = 10 + rows_of(len(tiers))
            stand.device.data[blocks] = 0
            assert stand.load(wanted[: len(tiers)], tiers, blocks) == len(tiers)
            assert (stand.device.data[blocks] == bytes_of(wanted[: len(tiers)])).all()
            restored += len(tiers)
    assert restored > ROUNDS
    assert stand.tiers.counts[1].stored > 0
    stand.worker.measure(0.0)
    assert all(0 < speed.latency + speed.block < 1 for speed in stand.tiers.speeds)


def test_a_load_counts_the_blocks_before_the_first_that_is_missing(stand: Stand) -> None:
    offer(stand, [1, 2, 3, 4])
    stand.mover.delete("host", keys_of([3]))
    tiers = np.zeros(4, dtype=np.int32)
    assert stand.load([1, 2, 3, 4], tiers, rows_of(4)) == 2
    assert stand.load([1, 9, 4], np.array([0, 1, 0], dtype=np.int32), rows_of(3)) == 1


def test_what_is_refused_is_answered_at_once(stand: Stand) -> None:
    stand.mover.close()
    stand.tiers.offer(keys_of([1]), rows_of(1), NEVER, 0, 100)
    (move,) = stand.tiers.drain()
    stand.worker.make([move])
    assert stand.answers.get_nowait() == OffloadDone(move.number, [False])
    assert stand.load([1], np.zeros(1, dtype=np.int32), rows_of(1)) == 0


def test_what_a_disk_has_is_known_to_the_tiers_again(stand: Stand) -> None:
    stand.disk.put(entries_of([1, 2, 3]), bytes_of([1, 2, 3]), rows_of(3))
    stand.worker.recover()
    answer = stand.answers.get(timeout=60)
    assert isinstance(answer, Recovered)
    assert stand.tiers.recover(answer.tier, answer.blocks, 0) == 3
    assert stand.tiers.restorable(keys_of([1, 2, 3, 4]), 0, 0).tolist() == [1, 1, 1]
