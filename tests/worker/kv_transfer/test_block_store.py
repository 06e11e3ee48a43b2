"""Shared memory goes with its creator, and nobody takes it from a living one."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from pigou.worker.kv_transfer.block_store import (
    PREFIX,
    SHARED_DIR,
    MappedMemory,
    SharedMemory,
    host_id,
    remove_orphans,
)

CREATE = """
import sys
from pigou.worker.kv_transfer.block_store import SharedMemory
memory = SharedMemory(10_000)
print(memory.name, flush=True)
sys.stdin.read()
"""


def test_what_one_process_writes_another_mapping_reads() -> None:
    memory = SharedMemory(10_000)
    memory.buffer[:] = np.arange(10_000) % 251
    mapped = MappedMemory(memory.name, memory.key)
    rows = mapped.blocks(0, 100)
    assert rows.shape == (100, 100)
    assert (rows.reshape(-1) == memory.buffer).all()
    with pytest.raises(ValueError, match="read-only"):
        rows[0, 0] = 1
    memory.close()


def test_the_file_goes_with_close_and_the_memory_with_its_last_array() -> None:
    memory = SharedMemory(5000)
    view = memory.buffer[:10]
    path = memory.path
    assert path.exists()
    assert path.stat().st_mode & 0o777 == 0o600
    memory.close()
    memory.close()
    assert not path.exists()
    view[:] = 7
    assert view.sum() == 70
    with pytest.raises(ValueError, match="closed"):
        _ = memory.buffer


def test_the_file_goes_when_its_creator_exits_or_is_collected() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CREATE], input="", capture_output=True, text=True, check=True
    )
    assert not (SHARED_DIR / done.stdout.strip()).exists()
    path = SharedMemory(100).path
    assert not path.exists()


def test_orphans_of_killed_processes_are_removed_and_those_of_the_living_are_not() -> None:
    mine = SharedMemory(100)
    with subprocess.Popen(
        [sys.executable, "-c", CREATE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        name = process.stdout.readline().strip()
        assert name not in remove_orphans()
        process.kill()
        process.wait(10)
        remove_orphans()
        assert not (SHARED_DIR / name).exists()
    assert mine.path.exists()
    mine.close()


def test_memory_that_is_not_there_is_refused_at_creation_not_at_the_first_touch() -> None:
    mine = f"{PREFIX}{os.getpid()}-*"  # other processes make and remove theirs meanwhile
    before = sorted(SHARED_DIR.glob(mine))
    with pytest.raises(OSError, match=r"no room for .* bytes in .*shm"):
        SharedMemory(1 << 50)
    assert sorted(SHARED_DIR.glob(mine)) == before


def test_a_re_used_name_is_noticed() -> None:
    memory = SharedMemory(100)
    with pytest.raises(ValueError, match="belongs to another"):
        MappedMemory(memory.name, "0" * 32)
    memory.close()


def test_the_offset_of_an_array_is_known_only_inside() -> None:
    memory = SharedMemory(4096)
    assert memory.offset_of(memory.buffer[100:200]) == 100
    assert memory.offset_of(np.zeros(10, dtype=np.uint8)) is None
    memory.close()


def test_one_host_has_one_id() -> None:
    assert host_id() == host_id()


def test_what_no_worker_made_is_left_alone() -> None:
    """A file of such a name that is no shared memory of ours, and a FIFO, which would block."""
    strangers = [SHARED_DIR / "pigou-kv-notes", SHARED_DIR / f"pigou-kv-1-{7:032x}"]
    strangers[0].write_text("mine")
    os.mkfifo(strangers[1])
    try:
        remove_orphans()
        assert all(path.exists() for path in strangers)
        with pytest.raises((OSError, ValueError)):
            MappedMemory(strangers[1].name, "k" * 32)
    finally:
        for path in strangers:
            path.unlink()
