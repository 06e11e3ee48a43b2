"""Workers that are forked from a process that has imported torch."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from pigou.fleet.fork_server import FORKED_NAME, ForkServer
from pigou.fleet.worker_process import WorkerProcess
from pigou.wire.fleet_secret import FleetSecret

SLEEPS = ["--executor", "sleep", "--rehearse", "0"]


async def gone(pid: int) -> None:
    async with asyncio.timeout(30):
        while Path(f"/proc/{pid}").exists():
            await asyncio.sleep(0.02)


def test_a_forked_worker_starts_and_ends_like_an_executed_one() -> None:
    async def run() -> None:
        forks = ForkServer(1)
        try:
            start = [
                WorkerProcess.start(f"w{i}", SLEEPS, FleetSecret("s" * 32), forks=forks)
                for i in range(3)
            ]
            ended, killed, left = await asyncio.gather(*start)
            for worker in (ended, killed, left):
                assert (await worker.ready(60))["url"].startswith("http://127.0.0.1:")
                assert Path(f"/proc/{worker.pid}/comm").read_text().strip() == FORKED_NAME
                assert os.getsid(worker.pid) == worker.pid
            await ended.stop(10)
            assert ended.code == 0
            os.kill(killed.pid, signal.SIGKILL)
            assert "ended by signal 9" in await killed.exited()
            await refused(forks)
            # Workers end with a fork server that is killed; others are executed.
            os.kill(forks.pid, signal.SIGKILL)
            assert "signal 9" in await left.exited()
            await gone(left.pid)
            assert await refused(forks) != FORKED_NAME
        finally:
            forks.close()

    asyncio.run(run())


async def refused(forks: ForkServer) -> str:
    """Start a worker that refuses its options; return the name of its process."""
    worker = await WorkerProcess.start("w", ["--max-seqs", "0"], None, forks=forks)
    name = Path(f"/proc/{worker.pid}/comm").read_text().strip()
    assert "status 2" in await worker.exited()
    assert "--max-seqs is 0" in "".join(worker._tail)
    return name
