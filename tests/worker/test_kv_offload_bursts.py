"""Bursts on a worker with tiny tiers: no cap is exceeded by a byte, and nothing leaks."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from random import Random

import pytest

from pigou.kv.hashing import chain
from pigou.kv.tier_config import StoreTier
from pigou.request import Request, SamplingParams
from pigou.runtime.stores.host_store import HostStore
from pigou.worker.config import WorkerConfig
from pigou.worker.engine_thread.commands import Abort, Add, ClearCache, Report, Stop
from pigou.worker.engine_thread.engine_thread import EngineThread
from pigou.worker.engine_thread.kv_offload import OffloadConnector
from pigou.worker.kv_transfer.connector import Transfers
from pigou.worker.startup.build import build

SEED = b"burst"
#: Bytes of a block of the executor that sleeps.
BLOCK = 4096
#: Seconds of the long version.
LONG = float(os.environ.get("PIGOU_BURST_SECONDS", "600"))


class Burst:
    """An engine with real stores and links, watched at every step."""

    def __init__(self, model: Path, disk: Path) -> None:
        config = WorkerConfig(
            model=str(model), executor="sleep", blocks=40, max_seqs=6, kv_transfer="none",
            tiers=(
                StoreTier(name="host", gib=24 * BLOCK / 2**30),
                StoreTier(name="disk", gib=60 * BLOCK / 2**30, uri=str(disk)),
            ),
            sleep_base=1, sleep_per_seq=1, sleep_prefill_rate=1e9, max_batched_tokens=128,
        )  # fmt: skip
        parts = build(config)
        assert parts.tiers is not None
        assert parts.core.tiers is not None
        self.config = config
        self.disk = disk
        self.core = parts.core
        self.names, self.mover = parts.tiers
        self.ended: set[str] = set()
        self.steps = 0
        self.faults: list[object] = []
        self.thread = EngineThread(
            parts.core, parts.backend, self.report, self.faults.append, events=False
        )
        self.thread.rest = parts.rest
        self.thread.transfers = Transfers(self.thread.put)
        self.tiers = OffloadConnector(parts.core.tiers, *parts.tiers, self.thread.put)
        self.thread.tiers = self.tiers
        self.tiers.recover()
        self.thread.start()

    def report(self, report: Report) -> None:
        """Look at every store, between two steps of the engine."""
        self.steps += 1
        self.ended |= {end.request for end in (*report.finished, *report.failed)}
        files = 0
        for path in self.disk.glob("*.pigou-kv"):
            try:
                files += path.stat().st_size
            except FileNotFoundError:  # deleted meanwhile
                continue
        if files > 60 * BLOCK:
            self.faults.append(f"{files} bytes of files")
        for name, store in self.mover.stores.items():
            if store.used_bytes > store.cap_bytes:
                self.faults.append(f"{store.used_bytes} bytes of {name}")
        for number, tier in enumerate(self.tiers.tiers.tiers):
            if tier.used_bytes > tier.cap_bytes:
                self.faults.append(f"{tier.used_bytes} bytes in tier {number}")

    def ask(self, name: str, tokens: list[int], most: int) -> None:
        hashes = chain(tokens, self.config.block_size, SEED)
        request = Request(name, len(tokens), most, hashes, arrival=time.monotonic_ns())
        params = SamplingParams(max_tokens=most, ignore_eos=True)
        self.thread.put(Add(request, tokens, params, 0, SEED))

    def wait(self, names: set[str]) -> None:
        end = time.monotonic() + 120
        while not names <= self.ended:
            assert not self.faults, self.faults
            assert time.monotonic() < end, f"{len(names - self.ended)} requests hang"
            time.sleep(0.002)

    def empty(self) -> bool:
        held = [len(store.entries()) for store in self.mover.stores.values()]
        queued = [s.reads.jobs + s.writes.jobs for s in self.mover.status().values()]
        return not any(held) and not any(queued)


def burst(model: Path, disk: Path, seconds: float, seed: int) -> None:
    before = set(threading.enumerate())
    run, random = Burst(model, disk), Random(seed)
    sessions: list[list[int]] = [[] for _ in range(12)]
    end, number = time.monotonic() + seconds, 0
    counts = run.tiers.tiers.counts

    def used() -> bool:
        return all(count.stored for count in counts) and any(count.restored for count in counts)

    while time.monotonic() < end or not used():  # however slow the machine is
        assert time.monotonic() < end + 120, "nothing went down, or came back"
        names = set()
        for _ in range(random.randrange(1, 12)):
            session = random.choice(sessions)
            if len(session) > 350 or random.random() < 0.03:
                session.clear()
            session += [random.randrange(100) for _ in range(random.randrange(8, 90))]
            number += 1
            run.ask(f"r{number}", list(session), random.randrange(1, 24))
            names.add(f"r{number}")
        if random.random() < 0.2:
            run.thread.put(Abort(random.choice(sorted(names))))
        if random.random() < 0.02:
            run.thread.put(ClearCache())
        run.wait(names)
    leave(run)
    assert set(threading.enumerate()) <= before, "a thread is left"


def leave(run: Burst) -> None:
    """Clear everything; then all is free again."""
    run.thread.put(ClearCache())
    end = time.monotonic() + 60
    while not run.empty():
        assert time.monotonic() < end, "something stays in a store"
        time.sleep(0.01)
    run.thread.put(Stop())
    assert run.thread.join(60)
    assert not run.faults, run.faults
    run.core.check_integrity()
    assert run.core.free_blocks == run.config.blocks
    assert [tier.used_bytes for tier in run.tiers.tiers.tiers] == [0, 0]
    host = run.mover.stores["host"]
    assert isinstance(host, HostStore)
    assert len(host._free) == len(host.arena), "a staging row is lost"
    run.tiers.close()


def test_bursts_exceed_no_cap_and_leave_nothing(model_folder: Path, tmp_path: Path) -> None:
    burst(model_folder, tmp_path / "disk", 5.0, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(LONG + 300)
def test_long_bursts_exceed_no_cap_and_leave_nothing(model_folder: Path, tmp_path: Path) -> None:
    burst(model_folder, tmp_path / "disk", LONG, seed=int(time.time()))
