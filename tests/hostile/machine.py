"""What fills the machine, or the places that the processes of a fleet share."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

import aiohttp
from tests.hostile.registry import LASTS_S, Target, again, attack, expect
from tests.lib.foreign_files import scatter

#: Names the folder of the file registry that an attacked fleet has.
FOLDER = "PIGOU_HOSTILE_FOLDER"
#: Processes that compute without end beside the fleet; seconds of a probe's longest answer.
BURNERS, PROBE_S = 10, 1.0


async def _probes(target: Target, until_s: float) -> list[float]:
    """Ask for `/health/live` until then; return the seconds that each answer took."""
    took = []
    async with aiohttp.ClientSession() as session:
        while (began := time.monotonic()) < until_s:
            async with session.get(target.url + "/health/live") as response:
                assert response.status == 200
            took.append(time.monotonic() - began)
            await asyncio.sleep(0.02)
    return took


@attack("machine")
async def busy_machine(target: Target) -> None:
    burning = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-c", "while True: pass", preexec_fn=partial(os.nice, 5)
        )
        for _ in range(BURNERS)
    ]
    try:
        await asyncio.sleep(0.5)
        took = await _probes(target, time.monotonic() + 2 * LASTS_S)
    finally:
        for process in burning:
            process.kill()
            await process.wait()
    assert max(took) < PROBE_S, f"a probe took {max(took):.2f} s"


@attack("shared")
async def a_registry_full_of_garbage(target: Target) -> None:
    folder = Path(os.environ[FOLDER])
    scatter(folder)
    body = {"prompt": "a", "max_tokens": 8, "ignore_eos": True}
    end = time.monotonic() + 8.0  # the registry is read again meanwhile
    while time.monotonic() < end:
        expect(await again(partial(target.send, body)), 200, 429)


@attack("queued")
async def prompts_of_a_queue_over_a_registry(target: Target) -> None:
    body = {"prompt": [5] * 2000, "max_tokens": 2, "ignore_eos": True}
    asking = (target.send(body, wait_s=20.0) for _ in range(30))
    expect(Counter(await asyncio.gather(*asking)), 200, 429)
