"""Tables of TTFT and ITL, measured on a live fleet by the load client."""

from __future__ import annotations

import asyncio
from typing import Any

from pigou.config import ConfigError
from pigou.performance.sweep_tables import DecodePoint, SweepTables
from pigou.sim.setup import Setup, SweepConfig
from pigou.sim.sweep import PrefillTimes, Watch, measure_cells
from pigou.workload.bench import bench
from pigou.workload.bench_config import BenchConfig, SweepTarget
from pigou.workload.bench_summary import LatencyDistribution, Summary
from pigou.workload.endpoint import EndpointError

#: Requests of each user of a closed loop.
_PER_USER = 4
_MILLISECOND = 1e-3
_BLOCK_TOKENS = 16


def check_live(config: SweepConfig, setup: Setup) -> None:
    """Raise ConfigError for settings that a live fleet decides, or missing ones."""
    own = "model gpu tp dp ep redundant_experts expert_load eplb timing engine max_model_len"
    for name in (*own.split(), "kv_quotas"):
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
    config: SweepConfig, setup: Setup, target: SweepTarget, watch: Watch = lambda *_: None,
    stop: asyncio.Event | None = None,
) -> SweepTables | None:  # fmt: skip
    """Measure the tables on a live fleet; None when stopped. Raises EndpointError."""
    check_live(config, setup)
    kv_tokens = setup.blocks * _BLOCK_TOKENS
    fits = config.decode_cells(setup.max_seqs, kv_tokens)
    try:
        pools = _LivePools(config, target, stop)
        prompts, prefill, decode = await measure_cells(config, fits, pools, watch)
    except _Stopped:
        return None
    return SweepTables(
        source="live", model="", gpu="", tp=1, timing="", kv_tokens=kv_tokens,
        max_seqs=setup.max_seqs, max_batched_tokens=setup.max_batched_tokens, overhead_s=0.0,
        transfer_token_s=0.0, prompts=tuple(prompts), prefill=tuple(prefill),
        decode=tuple(decode),
    )  # fmt: skip


class _Stopped(Exception):
    """A measurement was interrupted."""


class _LivePools:
    def __init__(
        self, config: SweepConfig, target: SweepTarget, stop: asyncio.Event | None
    ) -> None:
        self._config, self._target, self._stop = config, target, stop

    async def prompts(self, _: int, isl: int, rate: float, requests: int) -> PrefillTimes:
        load: dict[str, Any] = {"rate": rate} if rate else {"concurrency": 1}
        seed = isl + bool(rate)
        cell = await self._bench(seed, requests=requests, input=str(isl), output="2", **load)
        ttft_s = _seconds(cell.ttft)
        return PrefillTimes(ttft_s["mean"], ttft_s)

    async def streams(self, users: int, context: int) -> DecodePoint:
        """Streams are means over a run with its ends, so ITL is of slightly more of them."""
        workers, osl = self._target.decode_workers, self._config.osl
        total, isl = users * workers, max(context - osl // 2, 1)
        cell = await self._bench(
            context + users, concurrency=total, requests=_PER_USER * total, input=str(isl),
            output=str(osl), ignore_eos=True,
        )  # fmt: skip
        tpot_s = _seconds(cell.tpot)
        token_rate = cell.output_tokens_per_second / workers
        return DecodePoint(
            concurrency=users, streams=min(token_rate * tpot_s["mean"], float(users)),
            context_tokens=isl + 0.5 * osl, itl_mean_s=tpot_s["mean"],
            itl_p95_s=tpot_s["p95"], output_tok_s=token_rate,
        )  # fmt: skip

    async def _bench(self, seed: int, **load: Any) -> Summary:
        target, seed = self._target, self._config.seed + seed
        run = BenchConfig(url=target.url, api_key=target.api_key, seed=seed, **load)
        result = await bench(run, self._stop)
        if result is None or result.interrupted:
            raise _Stopped
        if result.summary.failed or not result.summary.completed:
            raise EndpointError(
                f"prompts of {run.input} tokens: {result.summary.failed} requests failed"
            )
        return result.summary


def _seconds(latency: LatencyDistribution | None) -> dict[str, float]:
    if latency is None:
        raise EndpointError("no request had two tokens; give a model that goes on past its end")
    names = ("mean", "p50", "p90", "p95", "p99")
    return {name: getattr(latency, name) * _MILLISECOND for name in names}
