"""A process that is told to end does so within its limit, whatever its threads do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.lib.stuck_command import STUCK_COMMAND

#: Runs a server with a limit, which gets stuck in one way, and says so.
SERVER = """
import asyncio, ctypes, sys, threading
from concurrent.futures import ThreadPoolExecutor
from pigou.stop_signals import StopSignals
import pigou.stop_signals as module
module._LOCKED_S, module.THREADS_S = 0.5, 0.3
fifo, how, limit_s = sys.argv[1:]

def stuck():
    print("stuck", flush=True)
    open(fifo).read()

async def main():
    over, loop = asyncio.Event(), asyncio.get_running_loop()
    stop = over.set
    if how == "interpreter":
        stop = lambda: ctypes.PyDLL(None).sleep(1000)
    elif how == "cancellation":
        stop = lambda: None
    with StopSignals(stop, float(limit_s)):
        if how == "loop":
            loop.call_later(0.1, stuck)
        elif how == "executor":
            loop.run_in_executor(None, stuck)
        elif how == "pool":
            ThreadPoolExecutor(1).submit(stuck)
        elif how == "thread":
            threading.Thread(target=stuck).start()
        else:
            print("not yet stuck", flush=True)
        await over.wait()

try:
    import uvloop
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
finally:
    module.end_with_threads(0)
"""


def begin(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def begin_stuck(fifo: Path, how: str, limit_s: float) -> subprocess.Popen[str]:
    process = begin("-c", SERVER, str(fifo), how, str(limit_s))
    assert process.stdout is not None
    assert "stuck" in process.stdout.readline()
    return process


def wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _pending(pid: int) -> bool:
    """Return whether a signal to a process is still to be taken: it might pass for the next."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("ShdPnd:")[1].split()[0], 16) != 0


def end(
    process: subprocess.Popen[str], limit_s: float, *signals: signal.Signals
) -> tuple[int, str]:
    """Send signals; return exit status and stderr, once it has ended within a limit."""
    for number in signals or (signal.SIGTERM,):
        process.send_signal(number)
        wait(lambda: process.poll() is not None or not _pending(process.pid))
    try:
        _, error = process.communicate(timeout=limit_s)
    finally:
        process.kill()
    return process.returncode, error


@pytest.mark.parametrize(
    ("how", "status", "text"),
    [
        ("executor", 0, "threads did not end"),
        ("pool", 0, "threads did not end"),
        ("thread", 0, "threads did not end"),
        ("loop", 1, "did not end within 0.5 s of SIGTERM"),
        ("cancellation", 1, "did not end within 0.5 s of SIGTERM"),
        ("interpreter", 1, "Timeout"),
    ],
)
def test_no_thread_keeps_a_process(tmp_path: Path, how: str, status: int, text: str) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    code, error = end(begin_stuck(fifo, how, 0.5 if status else 50.0), 60.0)
    assert (code, text in error) == (status, True), error


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(tmp_path: Path, number: signal.Signals) -> None:
    os.mkfifo(tmp_path / "fifo")
    process = begin_stuck(tmp_path / "fifo", "loop", 50.0)
    code, _ = end(process, 60.0, signal.SIGTERM, number)
    assert code == 128 + number  # 1 where its limit ended it


@pytest.mark.parametrize("command", ["serve", "worker"])
def test_servers_end_though_a_thread_is_stuck(tmp_path: Path, command: str) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    arguments = {
        "serve": ["--registry", f"file://{tmp_path}/registry", "--port", "0"],
        "worker": ["--executor", "sleep", "--model", "bundled", "--rehearse", "0", "--port", "0"],
    }[command]
    process = begin("-c", STUCK_COMMAND, str(fifo), command, *arguments)
    assert process.stdout is not None
    awaited = {"stuck", "shows the fleet" if command == "serve" else '"ready"'}
    while awaited:
        line = process.stdout.readline()
        assert line, "it has ended"
        awaited -= {each for each in awaited if each in line}
    code, error = end(process, 60.0)
    assert (code, "threads did not end" in error) == (0, True), error


#: Begins the processes of `pigou plan`, and prints their ids.
PLANNING = """
import time
from pigou.cli.plan import processes
with processes(2) as pool:
    for _ in range(4):
        pool.submit(time.sleep, 0.05)
    print(*pool._processes, flush=True)
    time.sleep(60)
"""


def test_processes_of_a_plan_end_with_it() -> None:
    process = begin("-c", PLANNING)
    assert process.stdout is not None
    pids = process.stdout.readline().split()
    assert pids
    process.kill()
    process.wait()
    wait(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    process.communicate()
