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
            refused = await WorkerProcess.start("w3", ["--max-seqs", "0"], None, forks=forks)
            assert "status 2" in await refused.exited()
            assert "--max-seqs is 0" in "".join(refused._tail)
        finally:
            forks.close()
        # Without a fork server its workers end; others are executed.
        await gone(left.pid)
        assert await left.exited()
        other = await WorkerProcess.start("w4", SLEEPS, None, forks=forks)
        assert (await other.ready(60))["pid"] == other.pid
        assert Path(f"/proc/{other.pid}/comm").read_text().strip() != FORKED_NAME
        await other.stop(10)
        assert other.code == 0

    asyncio.run(run())


def test_workers_end_with_a_fork_server_that_is_killed() -> None:
    async def run() -> None:
        forks = ForkServer(1)
        worker = await WorkerProcess.start("w0", SLEEPS, None, forks=forks)
        await worker.ready(60)
        os.kill(forks.pid, signal.SIGKILL)
        assert "signal 9" in await worker.exited()
        await gone(worker.pid)
        forks.close()

    asyncio.run(run())
