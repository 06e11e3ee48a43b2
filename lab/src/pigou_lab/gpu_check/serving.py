"""Completions over HTTP: a `pigou worker` on a free loopback port is started, measured, stopped."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pigou.fleet.worker_process import WorkerProcess
from pigou.workload.endpoint import ApiFlavour, EndpointClient, open_session
from pigou.workload.prompts import PromptJob
from pigou.workload.token_counter import Failure, Stream

_BLOCK = 16
_DRAIN_S = 10.0
_MODEL = "gpu-check"


@dataclass(frozen=True, slots=True)
class ServingSpeed:
    """How fast completions were streamed over HTTP."""

    streams: int
    ttft_s: float  # median seconds from sending a request to its first token
    itl_s: float  # mean seconds between two tokens of a stream
    tokens_per_s: float  # output tokens of all streams, from the first request to the last token


def measure_serving(
    model: Path,
    device: str,
    streams: Sequence[int],
    *,
    timeout_s: float,
    prompt: int = 64,
    output: int = 128,
) -> list[ServingSpeed]:
    """Start a worker, measure completions at each count of `streams`, stop it; FleetError."""
    return asyncio.run(_measure(model, device, streams, timeout_s, prompt, output))


async def _measure(
    model: Path, device: str, streams: Sequence[int], timeout_s: float, prompt: int, output: int
) -> list[ServingSpeed]:
    max_tokens = prompt + output
    blocks = max(streams) * (-(-max_tokens // _BLOCK) + 1)
    worker = await WorkerProcess.start(
        _MODEL,
        [
            "--model", str(model), "--served-model-name", _MODEL, "--device", device,
            "--block-size", str(_BLOCK), "--blocks", str(blocks), "--max-seqs", str(max(streams)),
            "--max-model-len", str(max_tokens), "--rehearse", "0", "--no-prefix-caching",
        ],
    )  # fmt: skip
    try:
        async with asyncio.timeout(timeout_s), open_session() as session:
            ready = await worker.ready(timeout_s)
            client = EndpointClient(session, ready["url"], _MODEL, ApiFlavour(), timeout=timeout_s)
            await _stream(client, max(streams), prompt, 2)  # the first steps are slower
            return [await _stream(client, count, prompt, output) for count in streams]
    except TimeoutError:
        raise AssertionError(f"the worker did not serve all within {timeout_s:g} s") from None
    finally:
        await worker.stop(_DRAIN_S)


async def _stream(client: EndpointClient, streams: int, prompt: int, output: int) -> ServingSpeed:
    rng = np.random.default_rng(streams)
    jobs = [PromptJob(rng.integers(3, 256, size=prompt).tolist(), output) for _ in range(streams)]
    began_ns = time.monotonic_ns()
    outcomes = await asyncio.gather(*(client.send(job, began_ns) for job in jobs))
    ttft_s, results = [], []
    for outcome in outcomes:
        result = outcome.result
        assert not isinstance(result, Failure), f"{result.reason}: {result.detail}"
        assert result.tokens == output, f"a stream has {result.tokens} tokens, not {output}"
        ttft_s.append((result.first - outcome.sent) / 1e9)
        results.append(result)
    return _speed(began_ns, ttft_s, results)


def _speed(began_ns: int, ttft_s: Sequence[float], results: Sequence[Stream]) -> ServingSpeed:
    gaps = sum(result.tokens - 1 for result in results)
    tokens = sum(result.tokens for result in results)
    seconds = (max(result.last for result in results) - began_ns) / 1e9
    return ServingSpeed(
        streams=len(results),
        ttft_s=float(np.median(ttft_s)),
        itl_s=sum(result.last - result.first for result in results) / 1e9 / max(gaps, 1),
        tokens_per_s=tokens / seconds,
    )
