"""A healthy tenant: it streams without a pause, and keeps what each token took."""

from __future__ import annotations

import asyncio
import json
import time

import aiohttp
import numpy as np

TOKENS, STREAMS = 40, 4
#: Phases in which nobody attacks.
QUIET, AFTER = "quiet", "after an attack"


class Tenant:
    """Streams, and keeps the gaps between tokens in seconds by phase."""

    def __init__(self, url: str, key: str) -> None:
        self._url = url
        self._headers = {"authorization": f"Bearer {key}"}
        self.gaps: dict[str, list[float]] = {}
        self.phase = QUIET
        self.streams = 0
        self.faults: list[str] = []
        self.over = False

    def p99_s(self, phase: str) -> float:
        """Return the P99 inter-token latency of a phase; raise AssertionError without any."""
        gaps = self.gaps.get(phase)
        assert gaps, f"no token came during {phase}"
        return float(np.quantile(gaps, 0.99))

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
                "return_token_ids": True, "temperature": 0}  # fmt: skip
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
