"""Tables of TTFT and ITL, measured on simulated pools with the production scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import count, product
from typing import NamedTuple, Protocol

import numpy as np

from pigou.config import ConfigError
from pigou.performance.model import PerformanceModel
from pigou.performance.sweep_tables import (
    DecodePoint,
    PrefillPoint,
    PromptPoint,
    SweepTables,
)
from pigou.request import SECOND, Role
from pigou.sim.client import ClientConfig
from pigou.sim.fleet_config import read_fleet
from pigou.sim.pool_performance import measure_performance
from pigou.sim.setup import Setup, SweepConfig
from pigou.sim.simulation import Simulation, unlimited
from pigou.sim.virtual_clock import EPOCH, Phase
from pigou.sim.workload import ClosedLoop, OpenLoop, RequestLengths, renewal
from pigou.windows.planner_window import PlannerWindow

#: Prompts that are sent one after the other, to measure them by themselves.
_PROMPTS = 5
#: Outputs until the streams of a closed loop are mixed, and until they were measured.
_MIXED, _MEASURED = 1.5, 5.0
#: Looks at the streams within one output.
_LOOKS = 20
#: Prefill workers of a decode cell at most: prompts hardly wait there.
_FEEDERS = 8
_KEY = -2
#: Called with the cells done, all of them, and what the next one is.
Watch = Callable[[int, int, str], None]


class PrefillTimes(NamedTuple):
    """Seconds of prefill of one prompt, and TTFT by statistic (`mean`, `p50`, ...)."""

    prefill_s: float
    ttft_s: dict[str, float]


class SweptPools(Protocol):
    """Pools that a sweep measures, simulated or live."""

    async def prompts(self, workers: int, isl: int, rate: float, requests: int, /) -> PrefillTimes:
        """Measure prompts of one length; rate 0 sends each when the one before has ended."""
        ...

    async def streams(self, users: int, context: int) -> DecodePoint:
        """Measure streams of one length on each decode worker."""
        ...


async def measure_cells(
    config: SweepConfig, fits: Sequence[tuple[int, int]], pools: SweptPools, watch: Watch
) -> tuple[list[PromptPoint], list[PrefillPoint], list[DecodePoint]]:
    """Measure the cells of both tables; `fits` are the decode cells that a worker holds."""
    total = len(config.isls) * (1 + len(config.pool_sizes) * len(config.utilisations)) + len(fits)
    done = count()
    prompts, prefill, decode = [], [], []
    for isl in config.isls:
        watch(next(done), total, f"prompts of {isl} tokens alone")
        single = await pools.prompts(1, isl, 0.0, _PROMPTS)
        prompts.append(
            PromptPoint(isl_tokens=isl, prefill_s=single.prefill_s, ttft_s=single.ttft_s["mean"])
        )
        for workers, utilisation in product(config.pool_sizes, config.utilisations):
            watch(next(done), total, f"{workers} prefill workers at {utilisation:g}")
            rate = utilisation * workers / single.prefill_s
            cell = await pools.prompts(workers, isl, rate, config.requests)
            prefill.append(
                PrefillPoint(
                    workers=workers, isl_tokens=isl, utilisation=utilisation, rate_rps=rate,
                    requests=config.requests,
                    **{f"ttft_{name}_s": value for name, value in cell.ttft_s.items()},
                )
            )  # fmt: skip
    for users, context in fits:
        watch(next(done), total, f"{users} streams of {context} tokens")
        decode.append(await pools.streams(users, context))
    return prompts, prefill, decode


def sweep(config: SweepConfig, setup: Setup, watch: Watch = lambda *_: None) -> SweepTables:
    """Measure the tables in simulations, without decode cells that do not fit."""
    max_tokens = max(*config.isls, max(config.context_tokens) + config.osl)
    known = _performance(setup, max_tokens)
    fits = config.decode_cells(known.max_seqs, known.kv_tokens)
    if not fits:
        raise ConfigError(
            "contexts and concurrency: no pair fits a worker; give fewer tokens, fewer users, or "
            "more blocks"
        )
    pools = _SimulatedPools(config, setup, known)
    prompts, prefill, decode = asyncio.run(measure_cells(config, fits, pools, watch))
    overhead_s, transfer_token_s = _overhead(prompts)
    return SweepTables(
        source="simulator", model=setup.model, gpu=setup.gpu, tp=setup.tp, dp=setup.dp,
        ep=setup.ep, timing=setup.timing,
        kv_tokens=int(known.kv_tokens), max_seqs=known.max_seqs,
        max_batched_tokens=known.chunk_tokens, overhead_s=overhead_s,
        transfer_token_s=transfer_token_s, prompts=tuple(prompts), prefill=tuple(prefill),
        decode=tuple(decode),
    )  # fmt: skip


class _SimulatedPools:
    def __init__(self, config: SweepConfig, setup: Setup, known: PerformanceModel) -> None:
        self._config, self._setup, self._known = config, setup, known

    async def prompts(self, workers: int, isl: int, rate: float, requests: int) -> PrefillTimes:
        seed = self._config.seed
        lengths = RequestLengths(input=(isl, isl), output=(2, 2))
        load: OpenLoop | ClosedLoop
        if rate:
            load = renewal(lengths, rate, 1.0, requests, 0.0, seed)
        else:
            load = ClosedLoop(lengths=lengths, phases=((1, 1e6),), requests=requests)
        simulation = _simulation(load, workers, workers, self._setup, seed)
        document = simulation.run().document()
        if document["completed"] < requests:
            raise ConfigError(f"isl is {isl}: a worker cannot hold it; give fewer tokens")
        busy_ns = sum(
            worker.sim.meter.prefill_ns for worker in simulation.fleet.workers
            if worker.sim is not None and worker.info.role is Role.PREFILL
        )  # fmt: skip
        return PrefillTimes(busy_ns / SECOND / requests, document["ttft_s"])

    async def streams(self, users: int, context: int) -> DecodePoint:
        config, known = self._config, self._known
        isl = max(context - config.osl // 2, 1)
        output_s = config.osl * known.decode.itl_s(float(users), float(context))
        output_s += known.prefill.seconds(float(isl), float(isl)) * max(users / _FEEDERS, 1.0)
        load = ClosedLoop(
            lengths=RequestLengths(input=(isl, isl), output=(config.osl, config.osl)),
            phases=((users, _MEASURED * output_s),),
            ramp=output_s,
            drain=False,
        )
        feeders = min(users, _FEEDERS)
        simulation = _simulation(load, feeders, 1, self._setup, config.seed)
        meter, clock = simulation.scaled_fleet("").meter, simulation.clock
        windows: list[PlannerWindow] = []
        begin = EPOCH + round((1.0 + _MIXED) * output_s * SECOND)
        end = EPOCH + round(_MEASURED * output_s * SECOND)
        step = max((end - begin) // round(_LOOKS * (_MEASURED - _MIXED)), 1)

        def look(now: int) -> None:
            meter.sample(now)
            if now + step < end:
                clock.at(now + step, Phase.TICK, _KEY, look)

        def note(now: int) -> None:
            windows.append(meter.window(now))

        clock.at(begin, Phase.TICK, _KEY, note)
        clock.at(begin + step // 2, Phase.TICK, _KEY, look)
        clock.at(end, Phase.TICK, _KEY, note)
        document = simulation.run().document()
        worker = next(
            worker
            for pool in windows[-1].pools
            if pool.role is Role.DECODE
            for worker in pool.workers
        )
        streams = worker.mean_running or 0.0
        if not streams or not worker.itl_s:
            raise ConfigError(
                f"concurrency is {config.concurrency!r}: {users} users left no stream"
            )
        seconds = worker.itl_s
        return DecodePoint(
            concurrency=users,
            streams=streams,
            context_tokens=isl + 0.5 * config.osl,
            itl_mean_s=seconds,
            itl_p95_s=document["tpot_s"]["p95"] or seconds,
            output_tok_s=streams / seconds,
        )


def _simulation(
    workload: OpenLoop | ClosedLoop, prefill: int, decode: int, setup: Setup, seed: int
) -> Simulation:
    control = unlimited(policy="least-loaded", seed=seed)
    fleet = read_fleet(f"{prefill}p+{decode}d")
    return Simulation(workload, fleet, setup, control, ClientConfig(), seed=seed)


def _performance(setup: Setup, max_tokens: int) -> PerformanceModel:
    """Return a worker's performance, by its timing model."""
    lengths = RequestLengths(input=(max_tokens, max_tokens), output=(2, 2))
    simulation = _simulation(renewal(lengths, 1.0, 0.0, 1, 0.0, 0), 1, 1, setup, 0)
    pool = simulation.membership.pools["decode"]
    return measure_performance(pool.spec, Role.DECODE, simulation.config)


def _overhead(prompts: list[PromptPoint]) -> tuple[float, float]:
    """Return TTFT's overhead: constant, and per token."""
    tokens = np.array([point.isl_tokens for point in prompts], dtype=np.float64)
    rest = np.array([max(point.ttft_s - point.prefill_s, 0.0) for point in prompts])
    if len(prompts) < 2:
        return float(rest[0]), 0.0
    slope, base = np.polyfit(tokens, rest, 1)
    if slope < 0 or base < 0:
        return float(rest.mean()), 0.0
    return float(base), float(slope)
