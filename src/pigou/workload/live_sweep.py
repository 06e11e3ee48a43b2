"""Tables of TTFT and ITL, measured on a live fleet by the load client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from pigou.config import ConfigError
from pigou.performance.sweep_tables import (
    DecodePoint,
    PrefillPoint,
    PromptPoint,
    SweepTables,
)
from pigou.sim.setup import Setup, SweepConfig
from pigou.workload.bench import bench
from pigou.workload.bench_config import BenchConfig
from pigou.workload.bench_summary import LatencyDistribution, Summary
from pigou.workload.endpoint import EndpointError

#: Requests one after the other, and of each user of a closed loop.
_PROMPTS, _PER_USER = 5, 4
_MILLISECOND = 1e-3
_BLOCK_TOKENS = 16


@dataclass(frozen=True)
class SweepTarget:
    """An otherwise idle live fleet to sweep."""

    url: str
    api_key: str = ""  # sent as bearer token
    decode_workers: int = 1  # number of workers sharing the streams


def check_live(config: SweepConfig, setup: Setup) -> None:
    """Raise ConfigError for settings that a live fleet decides, or missing ones."""
    for name in ("model", "gpu", "tp", "timing", "engine", "max_model_len"):
        if getattr(setup, name) != getattr(Setup(), name):
            raise ConfigError(
                f"{name} is {getattr(setup, name)!r}, and the live fleet has its own; leave it out"
            )
    if len(config.pool_sizes) != 1:
        raise ConfigError(
            f"workers is {config.workers!r}; give the one number of prefill workers that the live "
            "fleet has"
        )
    if not setup.blocks:
        raise ConfigError("blocks is 0; give the KV blocks of one worker of the live fleet")


async def live_sweep(
    config: SweepConfig, setup: Setup, target: SweepTarget,
    watch: Callable[[int, int, str], None] | None = None, stop: asyncio.Event | None = None,
) -> SweepTables | None:  # fmt: skip
    """Measure the tables on a live fleet; None when stopped. Raises EndpointError.

    Streams are means over a run with its ends, so ITL is of slightly more of them.
    """
    check_live(config, setup)
    (workers,) = config.pool_sizes
    kv_tokens = setup.blocks * _BLOCK_TOKENS
    fits = config.decode_cells(setup.max_seqs, kv_tokens)
    cells = len(config.isls) * (1 + len(config.utilisations)) + len(fits)
    done = 0

    async def measure(what: str, seed: int, **load: object) -> Summary | None:
        nonlocal done
        if watch is not None:
            watch(done, cells, what)
        done += 1
        run = BenchConfig(url=target.url, api_key=target.api_key, seed=config.seed + seed, **load)  # type: ignore[arg-type]
        result = await bench(run, stop)
        if result is None or result.interrupted:
            return None
        if result.summary.failed or not result.summary.completed:
            raise EndpointError(f"{what}: {result.summary.failed} requests failed")
        return result.summary

    prompts, prefill, decode = [], [], []
    for isl in config.isls:
        one = await measure(
            f"prompts of {isl} tokens alone", isl, concurrency=1, requests=_PROMPTS,
            input=str(isl), output="2",
        )  # fmt: skip
        if one is None:
            return None
        single = _seconds(one.ttft)
        prompts.append(PromptPoint(isl_tokens=isl, prefill_s=single["mean"], ttft_s=single["mean"]))
        for utilisation in config.utilisations:
            rate = utilisation * workers / single["mean"]
            cell = await measure(
                f"{workers} prefill workers at {utilisation:g}", isl + 1, rate=rate,
                requests=config.requests, input=str(isl), output="2",
            )  # fmt: skip
            if cell is None:
                return None
            ttft = {f"ttft_{name}_s": value for name, value in _seconds(cell.ttft).items()}
            prefill.append(
                PrefillPoint(
                    workers=workers, isl_tokens=isl, utilisation=utilisation, rate_rps=rate,
                    requests=config.requests, **ttft,
                )
            )  # fmt: skip
    for users, context in fits:
        total = users * target.decode_workers
        isl = max(context - config.osl // 2, 1)
        cell = await measure(
            f"{users} streams of {context} tokens", context + users, concurrency=total,
            requests=_PER_USER * total, input=str(isl), output=str(config.osl), ignore_eos=True,
        )  # fmt: skip
        if cell is None:
            return None
        tpot = _seconds(cell.tpot)
        token_rate = cell.output_tokens_per_second / target.decode_workers
        decode.append(
            DecodePoint(
                concurrency=users, streams=min(token_rate * tpot["mean"], float(users)),
                context_tokens=isl + 0.5 * config.osl, itl_mean_s=tpot["mean"],
                itl_p95_s=tpot["p95"], output_tok_s=token_rate,
            )
        )  # fmt: skip
    return SweepTables(
        source="live", model="", gpu="", tp=1, timing="", kv_tokens=kv_tokens,
        max_seqs=setup.max_seqs, max_batched_tokens=setup.max_batched_tokens, overhead_s=0.0,
        transfer_token_s=0.0, prompts=tuple(prompts), prefill=tuple(prefill),
        decode=tuple(decode),
    )  # fmt: skip


def _seconds(latency: LatencyDistribution | None) -> dict[str, float]:
    if latency is None:
        raise EndpointError("no request had two tokens; give a model that goes on past its end")
    names = ("mean", "p50", "p90", "p95", "p99")
    return {name: getattr(latency, name) * _MILLISECOND for name in names}
