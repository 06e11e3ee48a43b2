"""The fleets that are attacked: `pigou serve` in a process of its own, on loopback."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from tests.hostile.machine import FOLDER
from tests.lib.server_process import nats_server

from pigou.fleet.fork_server import FORKED_NAME
from pigou.gateway.auth.keys import make_key

ROOT = Path(__file__).resolve().parents[2]
SLEEP = ("--timing", "law:itl_a=0.01,itl_b=0.0002,prefill_token=0.00005")
#: A prompt of 2,000 tokens takes 3 s, on a prefill worker that nobody else needs.
SLOW = ("--timing", "law:itl_a=0.01,itl_b=0.0002,prefill_token=0.0015")
SLEEPING = ("--executor", "sleep", "--rehearse", "0")
IMPATIENT = ("--hang-timeout", "2", "--client-timeout", "2")
#: Options by fleet, and the families of attacks that it gets.
FLEETS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "front": (("--prefill", "0", "--decode", "0", "--both", "2", *SLEEP),
              ("bodies", "connections", "sharing", "machine")),
    "patience": (("--prefill", "1", "--decode", "2", "--policy", "least-loaded", *SLOW, *IMPATIENT,
                  "--", "--rehearse", "0"),
                 ("patience",)),
    "model": (("--prefill", "0", "--decode", "0", "--both", "2", "--", "--rehearse", "0"),
              ("grammars", "faults")),
    "attached": ((), ("upstreams",)),
    "still": (("--hang-timeout", "2"), ("still",)),
    "registered": ((), ("shared",)),
    "queued": ((), ("queued",)),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fleet:
    """A fleet that runs; the keys are the healthy tenant's, the attacker's, the administrator's."""

    url: str
    healthy: str
    attacker: str
    admin: str
    process: psutil.Process
    log: Path

    def workers(self) -> set[int]:
        """Return the pids of the workers."""
        children = self.process.children(recursive=True)
        workers = (c for c in children if c.name() == FORKED_NAME or "worker" in c.cmdline())
        return {child.pid for child in workers}

    def memory(self) -> int:
        """Return the most memory that the gateway had since the last call, in bytes."""
        pid = self.process.pid
        status = Path(f"/proc/{pid}/status").read_text()
        peak = int(status.partition("VmHWM:")[2].split()[0]) * 1024
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # resets the peak (proc(5))
        return peak

    async def view(self) -> dict[str, Any]:
        """Return `/workers`."""
        headers = {"authorization": f"Bearer {self.admin}"}
        timeout = aiohttp.ClientTimeout(total=30)
        async with (
            aiohttp.ClientSession(headers=headers, timeout=timeout) as session,
            session.get(self.url + "/workers") as response,
        ):
            view: dict[str, Any] = await response.json()
            return view


@asynccontextmanager
async def serving(name: str, folder: Path) -> AsyncIterator[Fleet]:
    """Run a fleet of `FLEETS`."""
    options = FLEETS[name][0]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    if name == "model":
        paths.insert(0, str(Path(__file__).parent / "injected"))
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    keys = [make_key("healthy"), make_key("attacker"), make_key("operator", admin=True)]
    file, log = folder / "keys", folder / "log"
    file.write_text("\n".join(line for _, line in keys))
    async with AsyncExitStack() as stack:
        if name in ("attached", "still"):
            stubs = await stack.enter_async_context(
                _process("tests.hostile.stub_server", env=environment)
            )
            urls = [await _line(stubs, "http://") for _ in range(2)]
            options += tuple(word for url in urls for word in ("--attach", url))
        elif name in ("registered", "queued"):
            roles, url = ("both", "both"), f"file://{folder}/registry"
            os.environ[FOLDER] = str(folder / "registry")
            if name == "queued":
                roles = ("prefill", "decode", "decode")
                url = stack.enter_context(nats_server(folder)).url + "/fleet"
            options = ("--registry", url)
            options += ("--prefill-queue", url) if name == "queued" else ()
            for role in roles:
                own = options if role == "prefill" else options[:2]
                command = ("worker", "--port", "0", "--role", role, *own, *SLEEPING)
                await stack.enter_async_context(_process("pigou", *command, env=environment))
        process = await stack.enter_async_context(
            _process("pigou", "serve", "--port", "0", "--api-keys-file", str(file), *options,
                     env=environment, log=log)
        )  # fmt: skip
        url = (await _line(process, " at http://")).partition(" at ")[2].partition("/v1")[0]
        tokens = [key for key, _ in keys]
        yield Fleet(url, *tokens, psutil.Process(process.pid), log)


async def _line(process: asyncio.subprocess.Process, part: str) -> str:
    """Return the next line of stdout that has `part`; raise AssertionError without one."""
    assert process.stdout is not None
    async with asyncio.timeout(240):
        async for line in process.stdout:
            if part in line.decode():
                return line.decode().strip()
    raise AssertionError(f"it ended before it printed {part!r}")


@asynccontextmanager
async def _process(
    *command: str, env: dict[str, str], log: Path | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    errors = log.open("w") if log else None
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=errors, cwd=ROOT, env=env,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                async with asyncio.timeout(60):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
        if errors:
            errors.close()
