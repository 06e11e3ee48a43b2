"""A worker with tiers says what it says without them, whatever lies on its disk."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tiered_worker import PROMPTS, TieredWorker, caches, until

from pigou.runtime.stores.segment import Segment

SEGMENT = "00000000.pigou-kv"


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> Path:
    """A disk's folder, as it was when its worker was killed."""
    folder = tmp_path_factory.mktemp("full")
    disk = folder / "disk"
    tiered = TieredWorker(folder / "log", *caches(disk))
    try:
        for _ in range(2):
            assert tiered.texts(PROMPTS) == texts
        assert tiered.health()["status"] == "ok"
        tiered.still("disk")
        assert sum(tiered.figure("restored_blocks", tier) for tier in ("host", "disk")) > 0
        assert tiered.figure("stored_blocks", "disk") > PROMPTS
        tiered.worker.process.send_signal(signal.SIGKILL)
    finally:
        tiered.kill()
    return disk


def recovered(worker: TieredWorker) -> None:
    """Wait until the engine has heard what the disk has."""
    until(lambda: worker.figure("blocks", "disk") > 0)


def test_a_killed_worker_finds_its_blocks_on_the_disk(
    full: Path, texts: list[str], tmp_path: Path, begin: Callable[..., TieredWorker]
) -> None:
    disk = shutil.copytree(full, tmp_path / "disk")
    again = begin(*caches(disk))
    recovered(again)
    assert again.texts(PROMPTS) == texts
    assert again.figure("restored_blocks", "disk") > PROMPTS
    assert again.figure("corrupt_blocks", "disk") == 0


def spoil(path: Path) -> int:
    """Alter records of a segment in every way, each its own; returns how many."""
    segment = Segment.open(path)
    taken = np.flatnonzero(segment.table.any(axis=1)).tolist()
    start, size = Segment.overhead(segment.slots), (path.stat().st_size)
    block = (size - start) // segment.used
    segment.close()
    with path.open("r+b") as file:

        def change(at: int, data: bytes) -> None:
            file.seek(at)
            file.write(data)

        def block_of(slot: int) -> bytes:
            file.seek(start + slot * block)
            return file.read(block)

        flipped, zeroed, left, right, header, torn = taken[:6]
        change(start + flipped * block + block // 2, bytes(range(1, 200)))
        change(start + zeroed * block, bytes(block))
        one, other = block_of(left), block_of(right)
        change(start + left * block, other)
        change(start + right * block, one)
        change((1 + header) * 128 + 40, b"\x55" * 16)
        change((1 + torn) * 128 + 100, bytes(28))
        file.truncate(size - block // 2)  # and the last one is cut off
    return 7


def test_whatever_is_wrong_with_a_record_it_is_a_miss_and_a_line_in_the_log(
    full: Path, texts: list[str], tmp_path: Path, begin: Callable[..., TieredWorker]
) -> None:
    disk = shutil.copytree(full, tmp_path / "disk")
    wrong = spoil(disk / SEGMENT)
    worker = begin(*caches(disk))
    recovered(worker)
    assert worker.texts(PROMPTS) == texts
    assert 2 < worker.figure("corrupt_blocks", "disk") <= wrong
    log = worker.log.read_text()
    assert "torn or altered" in log
    assert worker.health()["status"] == "ok"


def test_a_foreign_file_is_no_hit_and_a_line_in_the_log(
    full: Path, texts: list[str], tmp_path: Path, begin: Callable[..., TieredWorker]
) -> None:
    disk = shutil.copytree(full, tmp_path / "disk")
    (disk / "00000007.pigou-kv").write_bytes(np.random.default_rng(0).bytes(5000))
    (disk / "00000008.pigou-kv").write_bytes(b"")
    whole = (disk / SEGMENT).read_bytes()
    (disk / "00000009.pigou-kv").write_bytes(whole[: len(whole) // 200])
    worker = begin(*caches(disk), "--block-size", "8", "--blocks", "80")
    assert worker.texts(PROMPTS) == texts  # of another layout: none of them is read
    until(lambda: worker.figure("stored_blocks", "disk") > 0)
    log = worker.log.read_text()
    for name in ("00000007", "00000008", "00000009"):
        assert f"{name}.pigou-kv was removed" in log
    assert "of another layout" in log
    assert worker.figure("used_bytes", "disk") <= 32 * 2**20
