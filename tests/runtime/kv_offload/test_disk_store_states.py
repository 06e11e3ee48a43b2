"""Whatever happens to a disk store's files between two openings, it never serves a wrong byte."""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from store_bench import NAMESPACE, bytes_of, entries_of, keys_of, rows_of
from tests.lib.examples import examples

from pigou.request import NEVER
from pigou.runtime.stores.disk_store import DiskStore

SIZE = 300
CAP = 6_000
NUMBERS = st.lists(st.integers(0, 30), min_size=1, max_size=8, unique=True)
SEEDS = st.randoms(use_true_random=False)


class DiskMachine(RuleBasedStateMachine):
    """A store against a dictionary of what it may hold; `sure` is what it must hold."""

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp())
        self.now = 100
        self.held: dict[int, int] = {}  # number -> expiry
        self.sure = True

    @initialize()
    def begin(self) -> None:
        self.open()

    def open(self, cap: int = CAP) -> None:
        self.store = DiskStore(self.path, NAMESPACE, SIZE, cap, clock=lambda: self.now)

    def files(self) -> list[Path]:
        return sorted(self.path.glob("*.pigou-kv"))

    @rule(numbers=NUMBERS, life=st.sampled_from([0, 5, 50]))
    def put(self, numbers: list[int], life: int) -> None:
        expiry = self.now + life if life else NEVER
        room = self.store.capacity - len(self.held)
        entries = entries_of(numbers, expiry)
        stored = self.store.put(entries, bytes_of(numbers, SIZE), rows_of(len(numbers)))
        new = [n for n in numbers if n not in self.held]
        if self.sure:
            assert stored.sum() == len(numbers) - len(new) + min(room, len(new))
        for n, there in zip(numbers, stored.tolist(), strict=True):
            if there:
                self.held.setdefault(n, expiry)

    @rule(numbers=NUMBERS)
    def get(self, numbers: list[int]) -> None:
        out = np.zeros((len(numbers), SIZE), dtype=np.uint8)
        good = self.store.get(keys_of(numbers), out, rows_of(len(numbers)))
        wanted = bytes_of(numbers, SIZE)
        for i, n in enumerate(numbers):
            expiry = self.held.get(n)
            alive = expiry is not None and self.now < expiry
            if good[i]:
                assert alive
                assert (out[i] == wanted[i]).all()
            else:
                assert not (alive and self.sure)
                self.held.pop(n, None)

    @rule(numbers=NUMBERS)
    def delete(self, numbers: list[int]) -> None:
        count = self.store.delete(keys_of(numbers))
        gone = [self.held.pop(n) for n in numbers if n in self.held]
        assert count == len(gone) or not self.sure

    @rule(seconds=st.integers(1, 30))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.open()
        self.find()

    def find(self) -> None:
        """Compare what survived with what may have; void blocks have been dropped."""
        found = {int(key) - 1 for key in self.store.entries().keys[:, 1]}
        alive = {n for n, expiry in self.held.items() if self.now < expiry}
        assert found <= alive
        assert found == alive or not self.sure
        self.held = {n: self.held[n] for n in found}

    @precondition(lambda self: self.files())
    @rule(chance=SEEDS, what=st.sampled_from(["cut", "flip", "drop", "junk", "grow"]))
    def damage(self, chance: random.Random, what: str) -> None:
        """Do harm while nobody looks."""
        self.store.close()
        file = chance.choice(self.files())
        raw = bytearray(file.read_bytes())
        if what == "cut":
            file.write_bytes(raw[: chance.randrange(len(raw) + 1)])
        elif what == "flip":
            for _ in range(chance.randrange(1, 4)):
                raw[chance.randrange(len(raw))] ^= chance.randrange(1, 256)
            file.write_bytes(raw)
        elif what == "drop":
            file.unlink()
        elif what == "grow":
            file.write_bytes(raw + chance.randbytes(chance.randrange(1, 700)))
        else:
            (self.path / "99999998.pigou-kv").write_bytes(chance.randbytes(chance.randrange(400)))
        self.sure = False
        self.open()
        self.find()

    @precondition(lambda self: len(self.files()) > 0)
    @rule(chance=SEEDS)
    def damage_under_way(self, chance: random.Random) -> None:
        """Do harm while the store has its files open."""
        file = chance.choice(self.files())
        with file.open("r+b") as opened:
            size = file.stat().st_size
            if chance.random() < 0.3:
                opened.truncate(chance.randrange(size + 1))
            else:
                opened.seek(chance.randrange(size))
                opened.write(chance.randbytes(chance.randrange(1, 40)))
        self.sure = False

    @invariant()
    def under_its_cap(self) -> None:
        if hasattr(self, "store"):
            size = sum(f.stat().st_size for f in self.files())
            assert size <= self.store.used_bytes <= CAP
            assert size == self.store.used_bytes or not self.sure

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
        shutil.rmtree(self.path)


DiskMachine.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=25)
TestDiskStates = DiskMachine.TestCase
