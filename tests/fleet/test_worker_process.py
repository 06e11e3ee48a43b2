"""Worker processes that end, or have to be ended."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE

from pigou.fleet.worker_process import WorkerProcess
from pigou.worker.kv_transfer.block_store import SHARED_DIR

#: A worker that hears no SIGTERM, with a file of shared memory.
DEAF = """
import fcntl, os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
name = f"pigou-kv-{os.getpid()}-test"
file = open(f"{sys.argv[1]}/{name}", "w")
fcntl.flock(file, fcntl.LOCK_EX)
print(name, flush=True)
time.sleep(60)
"""


def test_the_shared_memory_of_a_worker_that_has_to_be_killed_goes_with_it() -> None:
    async def run() -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", DEAF, str(SHARED_DIR), stdout=PIPE, stderr=PIPE
        )
        assert process.stdout is not None
        path = SHARED_DIR / (await process.stdout.readline()).decode().strip()
        worker = WorkerProcess("w0", process)
        assert path.is_file()
        await worker.stop(0.05)
        assert worker.code == -9
        assert not path.exists()

    asyncio.run(run())
