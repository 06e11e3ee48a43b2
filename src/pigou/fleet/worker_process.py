"""A worker process: started, waited for, ended."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Protocol, Self

import msgspec

from pigou.fleet.config import FleetError
from pigou.fleet.fork_server import QUIET, ForkedProcess, ForkServer
from pigou.fleet.hang_detection import EngineProgress, read_heartbeat
from pigou.logs import relay
from pigou.small_file import read_bytes, read_text
from pigou.wire.errors import DECODING_ERRORS
from pigou.wire.fleet_secret import DESCRIPTOR, FleetSecret
from pigou.worker.kv_transfer.block_store import remove_orphans

_log = logging.getLogger("pigou.worker")

#: Message for a worker killed for lack of memory.
OUT_OF_MEMORY = "out of memory"
#: Last words of a process whose allocator failed: torch's, Python's, C++'s.
_NO_MEMORY = re.compile(r"out of memory|OutOfMemoryError|MemoryError|bad_alloc", re.IGNORECASE)
#: Counters of the kernel's kills for want of memory: of this cgroup, else of this machine.
_OOM_KILLS = (Path("/sys/fs/cgroup/memory.events"), Path("/proc/vmstat"))
#: Steps of niceness between a gateway and its workers: it gets three times their share.
_NICE_STEPS = 5
_TAIL = 20
#: Seconds between looks for a worker's end, and for what it printed before to be read.
_LOOK_S, _REST_S = 0.25, 1.0
_LINE = 1 << 20


@cache
def worker_niceness() -> int | None:
    """Raise this process's priority above its workers'; return their niceness or None."""
    if not hasattr(os, "setpriority"):
        return None
    own = os.getpriority(os.PRIO_PROCESS, 0)
    try:
        os.setpriority(os.PRIO_PROCESS, 0, own - _NICE_STEPS)
    except OSError:
        return own + _NICE_STEPS
    return own


def _lower(pid: int) -> None:
    """Set a new worker's niceness, inherited by its children."""
    niceness = worker_niceness()
    if niceness is not None:
        with suppress(OSError):  # it has ended
            os.setpriority(os.PRIO_PROCESS, pid, niceness)


class MemberProcess(Protocol):
    """The process of a member; pid 0, no heartbeat and no state where it is elsewhere."""

    @property
    def pid(self) -> int: ...  # noqa: D102
    @property
    def heartbeat(self) -> EngineProgress | None: ...  # noqa: D102
    @property
    def process_state(self) -> ProcessState | None: ...  # noqa: D102
    @property
    def code(self) -> int | None: ...  # noqa: D102

    async def ready(
        self, timeout_s: float, on_stage: Callable[[str], None] | None = None
    ) -> dict[str, Any]:
        """Wait for the line that says where it listens; return it."""
        ...

    async def exited(self) -> str:
        """Return how it ended, once it has."""
        ...

    async def stop(self, drain_s: float) -> None:
        """End it: politely, and after `drain_s` seconds by force."""
        ...


class WorkerProcess:
    """`pigou worker` as a child in its own session, so that Ctrl-C is ours."""

    def __init__(self, name: str, process: asyncio.subprocess.Process | ForkedProcess) -> None:
        self.pid = process.pid
        self._name = name
        self._process = process
        self._tail: deque[str] = deque(maxlen=_TAIL)
        self.heartbeat: EngineProgress | None = None
        self._oom_kills = oom_kills()
        self._reader = asyncio.create_task(self._read_errors(), name=f"{name} log")
        self._listener: asyncio.Task[None] | None = None

    @property
    def process_state(self) -> ProcessState:
        """Process state by `/proc`."""
        return ProcessState(self.pid)

    @classmethod
    async def start(
        cls,
        name: str,
        arguments: Sequence[str],
        secret: FleetSecret | None = None,
        host: str = "127.0.0.1",
        forks: ForkServer | None = None,
    ) -> Self:
        """Start a worker on a free port, the secret in a pipe; it ends with this process."""
        environment = {
            "PIGOU_PARENT": str(os.getpid()),
            "PIGOU_STAGES": "1",
        }
        arguments = ["worker", "--port", "0", "--exit-with-parent", "--host", host, *arguments]
        if secret is None:
            return cls(name, await cls._execute(arguments, environment, (), forks))
        reading, writing = os.pipe()
        try:
            os.write(writing, secret.text())  # less than a pipe holds
            os.close(writing)
            environment[DESCRIPTOR] = str(reading)
            return cls(name, await cls._execute(arguments, environment, (reading,), forks))
        finally:
            os.close(reading)

    @staticmethod
    async def _execute(
        arguments: Sequence[str], environment: dict[str, str], descriptors: Sequence[int],
        forks: ForkServer | None = None,
    ) -> asyncio.subprocess.Process | ForkedProcess:  # fmt: skip
        process: asyncio.subprocess.Process | ForkedProcess | None = None
        if forks is not None:
            try:
                process = await forks.fork(arguments, environment, descriptors, _LINE)
            except OSError as error:
                _log.warning("a worker is executed instead of forked: %s", error)
        if process is None:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "pigou", *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={**os.environ, **QUIET, **environment},
                pass_fds=descriptors,
                start_new_session=True,
                limit=_LINE,
            )  # fmt: skip
        _lower(process.pid)
        return process

    async def ready(
        self, timeout_s: float, on_stage: Callable[[str], None] | None = None
    ) -> dict[str, Any]:
        """Wait for the line that says where it listens; raises FleetError with its last words."""
        stdout = self._process.stdout
        assert stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                while line := await stdout.readline():
                    if line.startswith(b'{"ready"'):
                        ready_line: dict[str, Any] = msgspec.json.decode(line)
                        self._listener = asyncio.create_task(
                            self._listen(), name=f"{self._name} heartbeat"
                        )
                        return ready_line
                    if on_stage is not None and line.startswith(b'{"stage"'):
                        on_stage(str(msgspec.json.decode(line)["stage"]))
        except TimeoutError:
            raise FleetError(f"{self._name} was not ready within {timeout_s:g} s") from None
        code = await self._ended()
        await self._read_rest()
        words = "\n".join(self._tail)
        why = f"{self._name} ended with status {code} before it was ready\n{words}"
        raise FleetError(why, 2 if code == 2 else 1)

    async def exited(self) -> str:
        """Return how it ended; `OUT_OF_MEMORY` if it lacked memory."""
        code = await self._ended()
        await self._read_rest()
        killed = code == -signal.SIGKILL and oom_kills() > self._oom_kills
        failed = code not in (0, -signal.SIGKILL) and any(map(_NO_MEMORY.search, self._tail))
        how = f"ended by signal {-code}" if code < 0 else f"ended with status {code}"
        return f"{how}, {OUT_OF_MEMORY}" if killed or failed else how

    async def stop(self, drain_s: float) -> None:
        """End it: politely, and after `drain_s` seconds by force; 0 forces at once."""
        if drain_s > 0:
            self._signal(signal.SIGTERM)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ended(), drain_s)
        if self._process.returncode is None:
            self._signal(signal.SIGKILL)
            await self._ended()
        if self.code:
            remove_orphans()  # shared memory that a killed worker leaves
        await self._read_rest()

    async def _ended(self) -> int:
        """Return the exit status; asyncio also waits for streams held by children."""
        waiting = asyncio.create_task(self._process.wait())
        try:
            while self._process.returncode is None:
                await asyncio.wait((waiting,), timeout=_LOOK_S)
        finally:
            waiting.cancel()
        return self._process.returncode

    async def _read_rest(self) -> None:
        """Read remaining output; orphans may hold the streams open."""
        readers = [task for task in (self._reader, self._listener) if task is not None]
        _, late = await asyncio.wait(readers, timeout=_REST_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*readers, return_exceptions=True)

    @property
    def code(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        return self._process.returncode

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def _read_errors(self) -> None:
        stderr = self._process.stderr
        assert stderr is not None
        while line := await _line(stderr):
            text = line.decode("utf-8", "replace").rstrip()
            self._tail.append(text)
            relay(_log, self._name, text)

    async def _listen(self) -> None:
        """Take in heartbeats, and whatever else it prints: a full pipe would stop it."""
        stdout = self._process.stdout
        assert stdout is not None
        while line := await _line(stdout):
            try:
                heartbeat = msgspec.json.decode(line, type=dict[str, Any]).get("heartbeat")
            except DECODING_ERRORS:
                _log.info("%s | %s", self._name, line.decode("utf-8", "replace").rstrip())
            else:
                self.heartbeat = read_heartbeat(heartbeat) or self.heartbeat
                self._oom_kills = oom_kills()


async def _line(stream: asyncio.StreamReader) -> bytes:
    """Return the next line, truncated if too long; empty at the end."""
    try:
        return await stream.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        return await stream.readexactly(error.consumed)


def oom_kills() -> int:
    """Return how many processes the kernel has killed for want of memory; 0 where it says none."""
    for path in _OOM_KILLS:
        with suppress(OSError):
            if line := re.search(r"^oom_kill (\d+)$", read_text(path), re.M):
                return int(line[1])
    return 0


class ProcessState:
    """Looks at a process of this machine, by `/proc` (proc(5)); without one nothing is known."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._ticks = -1

    def look(self) -> tuple[bool, bool]:
        """Return whether the process is stopped, and whether it has computed since last time."""
        stat = process_stat(self._pid)
        if stat is None:
            return False, False
        state, ticks = stat
        computed = 0 <= self._ticks < ticks
        self._ticks = ticks
        return state == "T" and not computed, computed


def process_stat(pid: int) -> tuple[str, int] | None:
    """Return the state and CPU ticks of a process of this machine (proc(5)); None where unknown."""
    try:
        text = read_bytes(f"/proc/{pid}/stat").decode("ascii", "replace")
    except OSError:
        return None
    # The name, in parentheses, may hold anything.
    fields = text.rpartition(")")[2].split()
    return (fields[0], int(fields[11]) + int(fields[12])) if len(fields) > 12 else None
