"""A healthy tenant's streams, while everything else attacks."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import numpy as np
import psutil
import pytest
from tests.hostile.run import ATTACKS

from pigou.gateway.keys import make_key

ROOT = Path(__file__).resolve().parents[2]
TOKENS, STREAMS = 40, 4
#: A token takes 10 ms at least; a worker holds many streams.
LAW = "law:itl_a=0.01,itl_b=0.0002,prefill=0.005"
FLOOR_S = 0.1


class Tenant:
    """Streams without a pause, and keeps what each token took."""

    def __init__(self, url: str, key: str) -> None:
        self._url = url
        self._headers = {"authorization": f"Bearer {key}"}
        self.gaps: dict[str, list[float]] = {}
        self.phase = "quiet"
        self.streams = 0
        self.faults: list[str] = []
        self.over = False

    async def run(self) -> None:
        """Stream until `over`."""
        timeout = aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(timeout=timeout, headers=self._headers) as session:
            await asyncio.gather(*(self._go_on(session, i) for i in range(STREAMS)))

    async def _go_on(self, session: aiohttp.ClientSession, number: int) -> None:
        while not self.over:
            self.streams += 1
            try:
                fault = await self._stream(session, f"stream {number}")
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                fault = repr(error)
            if fault:
                self.faults.append(f"{self.phase}: {fault}")
                await asyncio.sleep(0.1)

    async def _stream(self, session: aiohttp.ClientSession, prompt: str) -> str:
        """Stream once; return what was wrong, empty for nothing."""
        body = {"prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "stream": True,
                "return_token_ids": True}  # fmt: skip
        count, last, done = 0, 0.0, False
        async with session.post(self._url + "/v1/completions", json=body) as response:
            if response.status != 200:
                return f"status {response.status}: {await response.text()}"
            async for line in response.content:
                if not line.startswith(b"data: "):
                    continue
                if line.strip() == b"data: [DONE]":
                    done = True
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    return str(chunk["error"])
                now = time.monotonic()
                if last:
                    self.gaps.setdefault(self.phase, []).append(now - last)
                last = now
                count += sum(len(c.get("token_ids") or ()) for c in chunk["choices"])
        return "" if done and count == TOKENS else f"{count} tokens, done {done}"


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[tuple[str, str, str, psutil.Process]]:
    """Run a fleet; yield its address, the healthy tenant's key, the attacker's, its process."""
    keys = [make_key(name) for name in ("healthy", "attacker")]
    file = folder / "keys"
    file.write_text("\n".join(line for _, line in keys))
    command = [sys.executable, "-m", "pigou", "serve", "--port", "0", "--prefill", "0", "--decode",
               "0", "--both", "2", "--timing", LAW, "--api-keys-file", str(file)]  # fmt: skip
    log = folder / "log"
    with log.open("w") as errors:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=subprocess.PIPE, stderr=errors, cwd=ROOT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
    try:
        assert process.stdout is not None
        async with asyncio.timeout(240):
            async for line in process.stdout:
                if b" at http://" in line:
                    url = line.decode().partition(" at ")[2].partition("/v1")[0]
                    break
            else:
                raise AssertionError(f"the fleet did not start\n{log.read_text()[-3000:]}")
        yield url, keys[0][0], keys[1][0], psutil.Process(process.pid)
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                async with asyncio.timeout(60):
                    await process.wait()
            except TimeoutError:
                process.kill()


def workers(process: psutil.Process) -> set[int]:
    """Return the pids of the workers."""
    return {child.pid for child in process.children(recursive=True) if "worker" in child.cmdline()}


def p99(gaps: list[float]) -> float:
    return float(np.quantile(gaps, 0.99)) if gaps else 0.0


@pytest.mark.slow
def test_attacks_cost_a_healthy_tenant_no_stream_no_worker_and_little_time(tmp_path: Path) -> None:
    asyncio.run(_attack_all(tmp_path))


async def _attack_all(folder: Path) -> None:
    async with serving(folder) as (url, healthy, attacker, process):
        before = workers(process)
        tenant = Tenant(url, healthy)
        streaming = asyncio.create_task(tenant.run())
        await asyncio.sleep(3)
        for name in ATTACKS:
            tenant.phase = "quiet"
            await asyncio.sleep(0.5)
            tenant.phase = name
            attacking = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "tests.hostile.run", name, url, attacker, cwd=ROOT
            )
            assert await attacking.wait() == 0, f"{name} broke down"
        tenant.phase = "quiet"
        await asyncio.sleep(1)
        tenant.over = True
        await streaming
        quiet = p99(tenant.gaps.pop("quiet"))
        print(f"\nquiet: ITL P99 {1e3 * quiet:.1f} ms")
        for name, gaps in tenant.gaps.items():
            print(f"{name}: ITL P99 {1e3 * p99(gaps):.1f} ms, worst {1e3 * max(gaps):.1f} ms")
        during = p99([gap for gaps in tenant.gaps.values() for gap in gaps])
        print(f"all attacks: ITL P99 {1e3 * during:.1f} ms, {tenant.streams} streams")
        assert tenant.faults == []
        assert workers(process) == before != set()
        assert during <= max(3 * quiet, FLOOR_S)
