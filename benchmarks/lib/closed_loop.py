"""A closed loop of completions, for benchmarks that compare servers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp
import numpy as np


@dataclass(frozen=True)
class Job:
    """One completion: prompt token ids, and tokens to generate (the end token is ignored)."""

    prompt: list[int]
    output: int


@dataclass(frozen=True)
class Run:
    """What came of a list of jobs: output tokens, wall seconds, and each job's TTFT in seconds."""

    tokens: int
    seconds: float
    ttft: list[float]

    @property
    def rate(self) -> float:
        """Output tokens per second."""
        return self.tokens / self.seconds


def make_jobs(
    count: int, *, prompt: int, output: tuple[int, int], vocab: int, seed: int
) -> list[Job]:
    """Random prompts of `prompt` tokens; outputs uniform over the closed range `output`."""
    rng = np.random.default_rng(seed)
    return [
        Job(
            rng.integers(10, vocab - 10, prompt).tolist(),
            int(rng.integers(output[0], output[1] + 1)),
        )
        for _ in range(count)
    ]


def closed_loop(
    url: str, model: str, jobs: Sequence[Job], concurrency: int, stream: bool = True
) -> Run:
    """Run the jobs with `concurrency` in flight; raises RuntimeError when one falls short.

    Without `stream`, each reply comes as a whole, and no TTFT is noted.
    """
    return asyncio.run(_closed_loop(url, model, list(jobs), concurrency, stream))


async def _closed_loop(
    url: str, model: str, jobs: list[Job], concurrency: int, stream: bool
) -> Run:
    waiting = iter(jobs)
    ttft: list[float] = []
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def slot() -> int:
            return sum([await _complete(session, url, model, job, ttft, stream) for job in waiting])

        began = time.perf_counter()
        counts = await asyncio.gather(*(slot() for _ in range(concurrency)))
        return Run(sum(counts), time.perf_counter() - began, ttft)


async def _complete(
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    job: Job,
    ttft: list[float],
    stream: bool,
) -> int:
    body: dict[str, object] = {
        "model": model,
        "prompt": job.prompt,
        "max_tokens": job.output,
        "temperature": 0,
        "ignore_eos": True,
    }
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    began = time.perf_counter()
    last = b""
    async with session.post(f"{url}/v1/completions", json=body) as reply:
        if reply.status != 200:
            raise RuntimeError(f"{url}: {reply.status} {await reply.text()}")
        if not stream:
            last = await reply.read()
        else:
            async for line in reply.content:
                if not last:
                    ttft.append(time.perf_counter() - began)
                if line.startswith(b"data: {"):
                    last = line[6:]
    tokens = int(json.loads(last)["usage"]["completion_tokens"])
    if tokens != job.output:
        raise RuntimeError(f"{url} gave {tokens} tokens of {job.output}")
    return tokens
