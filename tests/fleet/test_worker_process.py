"""Worker processes that end, or have to be ended."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE
from contextlib import suppress
from pathlib import Path

import pytest

from pigou.fleet import worker_process
from pigou.fleet.worker_process import OUT_OF_MEMORY, WorkerProcess, worker_niceness
from pigou.worker.kv_transfer.block_store import SHARED_DIR

#: A worker that hears no SIGTERM, with a file of shared memory.
DEAF = """
import fcntl, os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
name = f"pigou-kv-{os.getpid()}-{0:032x}"
if "child" in sys.argv:
    subprocess.Popen(["sleep", "20"])  # it holds the streams open
file = open(f"{sys.argv[1]}/{name}", "w")
fcntl.flock(file, fcntl.LOCK_EX)
print(name, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("child", ["", "child"])
def test_the_shared_memory_of_a_worker_that_has_to_be_killed_goes_with_it(child: str) -> None:
    async def run() -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", DEAF, str(SHARED_DIR), child, stdout=PIPE, stderr=PIPE,
            start_new_session=True,
        )  # fmt: skip
        assert process.stdout is not None
        path = SHARED_DIR / (await process.stdout.readline()).decode().strip()
        worker = WorkerProcess("w0", process)
        assert path.is_file()
        stopping = asyncio.create_task(worker.stop(0.05))
        async with asyncio.timeout(15):
            while path.exists():
                await asyncio.sleep(0.01)
            await stopping
            assert "signal 9" in await worker.exited()
        assert worker.code == -9
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await asyncio.wait_for(process.wait(), 15)
        await asyncio.sleep(0.05)  # the streams close

    asyncio.run(run())


@pytest.mark.parametrize("permitted", [False, True])
def test_a_gateway_goes_before_the_workers_that_it_starts(
    permitted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, given = os.getpriority(os.PRIO_PROCESS, 0), {}

    def set_priority(_: int, pid: int, niceness: int) -> None:
        if pid == 0 and not permitted:
            raise PermissionError("only root may")
        given[pid] = niceness

    async def run() -> int:
        process = await WorkerProcess._execute(["--help"], dict(os.environ), ())
        await process.communicate()
        return process.pid

    monkeypatch.setattr(os, "setpriority", set_priority)
    worker_niceness.cache_clear()
    try:
        pid = asyncio.run(run())
    finally:
        worker_niceness.cache_clear()
    assert given.get(0, own) == own - 5 * permitted
    assert given[pid] == given.get(0, own) + 5


@pytest.mark.parametrize(
    ("code", "kernel_kills", "lacked"),
    [
        ("import time; time.sleep(60)", 1, True),
        ("import time; time.sleep(60)", 0, False),  # somebody's kill -9
        ("raise MemoryError", 0, True),
        ("raise RuntimeError('CUDA out of memory. Tried to allocate 2.00 GiB')", 0, True),
        ("raise ValueError('max_seqs is 0')", 1, False),
        ("import sys; print('out of memory', file=sys.stderr)", 1, False),
    ],
)
def test_a_worker_that_lacked_memory_is_told_from_others_that_end(
    code: str, kernel_kills: int, lacked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = tmp_path / "memory.events"
    counter.write_text("oom 3\noom_kill 2\noom_group_kill 0\n")
    monkeypatch.setattr(worker_process, "_OOM_KILLS", (tmp_path / "none", counter))

    async def run() -> str:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, stdout=PIPE, stderr=PIPE
        )
        worker = WorkerProcess("w0", process)
        counter.write_text(f"oom 3\noom_kill {2 + kernel_kills}\noom_group_kill 0\n")
        if "sleep" in code:
            process.send_signal(signal.SIGKILL)
        return await worker.exited()

    assert (OUT_OF_MEMORY in asyncio.run(run())) == lacked
