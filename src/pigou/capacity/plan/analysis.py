"""Analytic pass: figures of fleets at a load, by the planner's performance models.

Step times are those of the roofline. Limits of pools are quantiles of M/G/c and of a shared station
(`pigou.performance.pool_load`); those of fleets, and figures, replay the requests themselves
(`pigou.performance.fleet_replay`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from pigou.capacity.plan.demand import Demand
from pigou.config import ConfigError, EngineConfig
from pigou.cost.usage import usd_per_million_at
from pigou.models.architecture import Architecture
from pigou.models.gpus import PowerModel, kv_blocks
from pigou.models.gpus import gpu as gpu_named
from pigou.models.parallelism import ParallelConfig
from pigou.objectives import Slo
from pigou.performance.fleet_replay import ReplayedFleet, ReplayedPrompts, StepTable, replay
from pigou.performance.model import PerformanceModel, joint_share
from pigou.performance.pool_load import PoolLoad
from pigou.performance.speed import RequestMix
from pigou.request import Role
from pigou.sim.fleet_config import FleetConfig, WorkerGroup
from pigou.sim.network import LinkConfig
from pigou.sim.pool_performance import measure_performance
from pigou.sim.timing import RooflineTiming
from pigou.sim.timing_experts import read_expert_loads
from pigou.sim.worker_spec import WorkerSpec

#: Tokens of a block; batch up to which speeds are measured; shortest context that is measured.
_BLOCK_TOKENS, _MEASURED_SEQS, _MIN_TOKENS = 16, 512, 128
#: Workers of a `both` pool up to which each size is analysed; the limit of more is in proportion.
_EXACT_SIZES = 4
#: Steps of the TTFT objective in which the wait for a decode worker is counted.
_JOINING_STEPS = 50
#: Largest share of a decode worker's time that prompts take.
_MAX_BUSY = 0.9
#: Requests of a replay besides those before and after them, in mean request lifetimes.
_REPLAYED, _BEFORE, _AFTER = 300, 1.2, 1.0
#: Longest lifetime that is waited for, in seconds.
_LIFE_S = 60.0
#: Rates that are replayed, highest first, until one holds, and bisections between the last two.
_WIDER, _WIDER_STEPS, _HALVINGS = 1.25, 12, 6
#: Share of the requests that may be outside which a replay keeps in hand: it knows the speeds that
#: the router learns.
_SPARE = 0.2


class WorkerKind(msgspec.Struct, frozen=True, kw_only=True):
    """Workers that are alike."""

    gpu: str
    tp: int  # GPUs that share each layer
    kv_dtype: str  # number format of the KV cache; "" for the model's own
    max_seqs: int  # sequences of a step at most: the batch
    chunk: int  # tokens of a step at most
    dp: int = 1  # ranks, whose batch and chunk these are
    ep: bool = False

    @property
    def parallel(self) -> ParallelConfig:
        """How the GPUs of a worker share the model."""
        return ParallelConfig(self.tp, self.dp, self.ep)

    @property
    def gpus(self) -> int:
        """GPUs of a worker."""
        return self.tp * self.dp


class PlannedPool(msgspec.Struct, frozen=True, kw_only=True):
    """Workers of one role and kind."""

    role: Role
    kind: WorkerKind
    workers: int

    @property
    def gpus(self) -> int:
        """GPUs of all of them."""
        return self.workers * self.kind.gpus

    @property
    def ranks(self) -> int:
        """Data-parallel ranks of all of them, each analysed as a worker."""
        return self.workers * self.kind.dp


class Configuration(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet: one pool that does both, or prefill and decode apart."""

    pools: tuple[PlannedPool, ...]

    @property
    def name(self) -> str:
        """Like `8xboth` or `8p+4d`."""
        if len(self.pools) == 1:
            return f"{self.pools[0].workers}xboth"
        return "+".join(f"{pool.workers}{pool.role.value[0]}" for pool in self.pools)

    @property
    def gpus(self) -> dict[str, int]:
        """GPUs by kind."""
        counts: dict[str, int] = {}
        for pool in self.pools:
            counts[pool.kind.gpu] = counts.get(pool.kind.gpu, 0) + pool.gpus
        return counts

    @property
    def total_gpus(self) -> int:
        """GPUs of all kinds."""
        return sum(pool.gpus for pool in self.pools)

    @property
    def kv_dtype(self) -> str:
        """Number format of the KV cache, which all pools share."""
        return self.pools[0].kind.kv_dtype

    @property
    def tp(self) -> dict[str, int]:
        """GPUs that share each layer, by role."""
        return {pool.role.value: pool.kind.tp for pool in self.pools}

    @property
    def dp(self) -> dict[str, int]:
        """Data-parallel ranks of a worker, by role."""
        return {pool.role.value: pool.kind.dp for pool in self.pools}

    @property
    def batch(self) -> dict[str, int]:
        """Sequences of a step at most, by role."""
        return {pool.role.value: pool.kind.max_seqs for pool in self.pools}

    @property
    def workers_key(self) -> tuple[object, ...]:
        """The same for fleets that differ by batches and steps only."""
        return (self.name, *self.tp.values(), *self.dp.values(), self.kv_dtype, *self.gpus)

    def fleet(self, link: LinkConfig) -> FleetConfig:
        """Return the fleet for a simulation."""
        groups = tuple(
            WorkerGroup(
                role=pool.role, count=pool.workers, gpu=pool.kind.gpu, tp=pool.kind.tp,
                max_seqs=pool.kind.max_seqs, max_batched_tokens=pool.kind.chunk,
                dp=pool.kind.dp, ep=pool.kind.ep,
            )
            for pool in self.pools
        )  # fmt: skip
        return FleetConfig(workers=groups, link=link)


@dataclass(frozen=True)
class LoadFigures:
    """What a configuration does at a load."""

    rate_rps: float  # requests a second
    ttft_s: float
    itl_s: float
    e2e_s: float  # mean seconds of a request
    attained: float | None  # share of offered requests inside the objective; None: not known
    output_tok_s_per_gpu: float  # output tokens a second
    usd_per_million_output: float | None  # price of GPU time; None without prices


def plan_joules_per_token(
    made: Configuration, figures: LoadFigures, mix: RequestMix, model: Architecture
) -> float | None:
    """Return the joules of all GPUs for an output token; None without load."""
    tok_s = figures.rate_rps * mix.osl
    if tok_s <= 0.0:
        return None
    return sum(_watts(pool, figures, mix, model) for pool in made.pools) / tok_s


def _watts(pool: PlannedPool, figures: LoadFigures, mix: RequestMix, model: Architecture) -> float:
    """Return the watts of a pool.

    Prompts take their FLOPs at full power, streams (by Little's law) the rest of the time, or idle.
    """
    kind, device = pool.kind, gpu_named(pool.kind.gpu)
    power = PowerModel(device.max_watts)
    if kind.kv_dtype:
        model = replace(model, kv_dtype=kind.kv_dtype)
    rate, prompts = figures.rate_rps / pool.workers, 0.0
    if pool.role is not Role.DECODE:
        speed = device.peak(model.compute_dtype) * device.compute * kind.gpus
        prompts = min(rate * mix.computed * 2.0 * model.active_parameters / speed, 1.0)
    watts = prompts * power.prefill_watts(device.compute)
    if pool.role is Role.PREFILL:
        return (watts + (1.0 - prompts) * power.idle_w) * pool.gpus
    streams = rate * mix.osl * figures.itl_s
    busy = min(streams, 1.0) * (1.0 - prompts)
    read = model.weight_bytes + max(streams, 1.0) * mix.context * model.kv_bytes
    step_s = max(figures.itl_s * (1.0 - prompts), 1e-9)
    watts += busy * power.decode_watts(read / step_s / (device.bandwidth * kind.gpus))
    return (watts + max(1.0 - prompts - busy, 0.0) * power.idle_w) * pool.gpus


class Analysis:
    """What configurations do under one workload and one objective."""

    def __init__(
        self, model: Architecture, demand: Demand, slo: Slo, link: LinkConfig,
        usd_per_hour: Mapping[str, float], expert_load: str = "",
    ) -> None:  # fmt: skip
        self.expert_load = expert_load
        self.demand, self.slo, self.usd_per_hour = demand, slo, usd_per_hour
        self._model, self.link = model, link
        self._measured: dict[tuple[Role, WorkerKind], PerformanceModel] = {}
        self._loads: dict[tuple[Role, WorkerKind], PoolLoad | None] = {}
        self._limits: dict[tuple[Role, WorkerKind, int, int], float] = {}
        self._lives: dict[Configuration, float] = {}  # mean seconds of a request, last replayed

    def changed(self, slo: Slo, demand: Demand) -> Analysis:
        """Return the analysis for another objective and demand; keeps shared results."""
        other = Analysis(self._model, demand, slo, self.link, self.usd_per_hour, self.expert_load)
        other._measured = self._measured
        if slo == self.slo and demand.mix == self.demand.mix and demand.loop is self.demand.loop:
            other._loads, other._limits = self._loads, self._limits
        return other

    def performance(self, kind: WorkerKind, role: Role) -> PerformanceModel | None:
        """Return the performance model of a kind of workers; None where the model does not fit."""
        blocks = self._blocks(kind)
        if blocks is None:
            return None
        speeds = self._speeds(role, msgspec.structs.replace(kind, max_seqs=_MEASURED_SEQS))
        return replace(speeds, max_seqs=kind.max_seqs, kv_tokens=float(blocks * _BLOCK_TOKENS))

    def _speeds(self, role: Role, kind: WorkerKind) -> PerformanceModel:
        """Return the speeds of workers, which hold for narrower batches, too."""
        key = (role, kind)
        if key not in self._measured:
            model = self._cast(kind)
            max_tokens = max(self.demand.max_tokens, _MIN_TOKENS)
            engine = EngineConfig(
                blocks=max_tokens // _BLOCK_TOKENS + 1,  # for one request: steps take as long
                block_size=_BLOCK_TOKENS, max_seqs=kind.max_seqs, max_batched_tokens=kind.chunk,
                max_model_len=max_tokens,
            )  # fmt: skip
            loads = read_expert_loads(self.expert_load, model.experts)
            timing = RooflineTiming(
                model, gpu_named(kind.gpu), kind.parallel, loads, eplb=kind.ep and loads is not None
            ).of_rank()
            group = WorkerGroup(role=role, count=1)
            spec = WorkerSpec(
                group, engine, timing, model.kv_bytes,
                ahead=True, gpus=kind.tp, kv_heads=model.kv_heads,
            )  # fmt: skip
            serving = WorkerGroup(role=Role.BOTH, count=1)  # a fleet must decode
            fleet = FleetConfig(workers=(serving,), link=self.link)
            self._measured[key] = measure_performance(spec, role, fleet)
        return self._measured[key]

    def _blocks(self, kind: WorkerKind) -> int | None:
        """Return the KV blocks of a rank; None where it cannot hold the longest request."""
        try:
            blocks = kv_blocks(
                self._cast(kind), gpu_named(kind.gpu), kind.parallel, block_size=_BLOCK_TOKENS,
                max_batched_tokens=kind.chunk, max_seqs=kind.max_seqs,
            )  # fmt: skip
        except ConfigError:
            return None
        blocks //= kind.dp
        return blocks if blocks * _BLOCK_TOKENS > self.demand.max_tokens else None

    def _cast(self, kind: WorkerKind) -> Architecture:
        return replace(self._model, kv_dtype=kind.kv_dtype) if kind.kv_dtype else self._model

    # --- limits ---------------------------------------------------------------------------------

    def limit_rps(
        self, role: Role, kind: WorkerKind, workers: int, joining_s: float = 0.0
    ) -> float:
        """Return the most requests a second that a pool holds inside its part of the objective.

        `joining_s`, what first tokens take in the decode pool, is in steps of a 50th of the
        objective.
        """
        step = self.slo.ttft_s / _JOINING_STEPS
        joining = math.ceil(joining_s / step) if math.isfinite(step) else 0
        key = (role, kind, workers, joining)
        if key not in self._limits:
            more_s = joining * step if joining else 0.0
            self._limits[key] = self._limit(role, kind, workers, more_s)
        return self._limits[key]

    def _limit(self, role: Role, kind: WorkerKind, workers: int, more_s: float) -> float:
        load = self.load(kind, role)
        if load is None or workers < 1:
            return 0.0
        if role is Role.BOTH and workers > _EXACT_SIZES:
            return self.limit_rps(role, kind, _EXACT_SIZES) * workers / _EXACT_SIZES
        return load.limit_rps(workers * kind.dp, self.slo, joint_share(self.slo), more_s)

    def split_limit_rps(
        self, prefill: tuple[WorkerKind, int], decode: tuple[WorkerKind, int]
    ) -> float:
        """Return the limit of a prefill and a decode pool, kind and workers each, joining included.

        Prompts that decode workers compute are not counted: `replayed_limit_rps` takes longer.
        """
        limit = self.limit_rps(Role.DECODE, *decode)
        load = self.load(decode[0], Role.DECODE)
        if limit <= 0.0 or load is None:
            return 0.0
        remote = min(limit, self.limit_rps(Role.PREFILL, *prefill))
        joining_s = load.joining_s(remote, decode[1] * decode[0].dp)
        return min(limit, self.limit_rps(Role.PREFILL, *prefill, joining_s))

    def highest_rps(self, configuration: Configuration) -> float:
        """Return a rate that a fleet cannot exceed."""
        loads = [self.load(pool.kind, pool.role) for pool in configuration.pools]
        pools = configuration.pools
        if len(pools) == 1:
            return loads[0].highest_rps(pools[0].ranks) if loads[0] else 0.0
        first, second = loads
        if first is None or second is None:
            return 0.0
        shares = self.demand.classes.shares
        highest = pools[0].ranks / float(shares @ first.prompt_s)
        stall_s = float(shares @ second.stalls_s)
        if stall_s <= 0.0:
            return math.inf
        highest += _MAX_BUSY * pools[1].ranks / stall_s
        return min(self.limit_rps(Role.DECODE, pools[1].kind, pools[1].workers), highest)

    def attained(self, configuration: Configuration, rate_rps: float) -> float:
        """Return the share of replayed requests inside the objective."""
        return self._replayed(configuration, rate_rps)[3]

    def holds(self, configuration: Configuration, rate_rps: float) -> bool:
        """Whether a replay keeps the objective, with a little to spare."""
        share = self.slo.share
        return self.attained(configuration, rate_rps) >= share + _SPARE * (1.0 - share)

    def replayed_limit_rps(self, configuration: Configuration, highest: float) -> float:
        """Return the highest rate that holds in a replay, `highest` at most."""
        rates = [highest / _WIDER**step for step in range(_WIDER_STEPS if highest > 0.0 else 0)]
        inside = next((rate for rate in rates if self.holds(configuration, rate)), 0.0)
        outside = inside * _WIDER
        for _ in range(_HALVINGS if 0.0 < inside < highest else 0):
            rate = math.sqrt(inside * outside)
            holds = self.holds(configuration, rate)
            inside, outside = (rate, outside) if holds else (inside, rate)
        return inside

    def _replayed(
        self, configuration: Configuration, rate_rps: float
    ) -> tuple[float, float, float, float]:
        """Return TTFT and ITL at the percentile, mean E2E, and the share inside the objective."""
        first, second = configuration.pools[0], configuration.pools[-1]
        prefill, decode = (self.load(pool.kind, pool.role) for pool in (first, second))
        if prefill is None or decode is None:
            return math.inf, math.inf, math.inf, 0.0
        table, slo = self.demand.table, self.slo
        split = first is not second
        step_s = decode.step_s(1.0)
        life_s = self._lives.get(configuration, 1.5 * self.demand.mix.osl * step_s)
        count = _REPLAYED + round(rate_rps * min(life_s, _LIFE_S) * (_BEFORE + _AFTER))
        starts_s = table.starts_s[:count] * ((self.demand.rate_rps or 1.0) / rate_rps)
        arrivals = starts_s + table.after_s[:count] + table.places[:count] * life_s
        order = np.argsort(arrivals, kind="stable")
        arrivals = arrivals[order]
        prompts, computed, outputs = (
            column[order] for column in (table.prompts, table.computed, table.outputs)
        )
        local_s = decode.prefill_s(computed, prompts)
        chunk = second.kind.chunk
        stalls_s = np.maximum(local_s - np.ceil(computed / chunk) * step_s, 0.0)
        transfer_s = prefill.transfers_s(prompts) - step_s if split else np.zeros(len(prompts))
        taken_s = prefill.prefill_s(computed, prompts) if split else local_s
        times_s = replay(
            ReplayedPrompts(
                arrivals, prompts, outputs, computed, taken_s, transfer_s, local_s, stalls_s
            ),
            StepTable(*decode.step_table),
            ReplayedFleet(
                first.ranks if split else 0, second.ranks, float(first.kind.chunk),
                float(chunk), second.kind.max_seqs, decode.kv_tokens,
            ),
            rate_rps,
        )  # fmt: skip
        e2e_s = times_s[:, 1] - arrivals
        self._lives[configuration] = life_s = float(e2e_s.mean())
        life_s = min(life_s, _LIFE_S)
        end_s = max(arrivals[-1] - _AFTER * life_s, arrivals[0])
        begin_s = min(arrivals[0] + _BEFORE * life_s, end_s)
        chosen = (arrivals >= begin_s) & (arrivals <= end_s)
        if not chosen.any():
            return math.inf, math.inf, life_s, 0.0  # in overload no request is between
        ttft_s = (times_s[:, 0] - arrivals)[chosen]
        several = outputs[chosen] > 1.0
        gaps_s = (times_s[:, 1] - times_s[:, 0])[chosen] / np.maximum(outputs[chosen] - 1.0, 1.0)
        inside = (ttft_s <= slo.ttft_s) & ((gaps_s <= slo.itl_s) | ~several)
        itl_s = float(np.percentile(gaps_s[several], slo.percentile)) if several.any() else 0.0
        ttft = float(np.percentile(ttft_s, slo.percentile))
        return ttft, itl_s, float(e2e_s[chosen].mean()), float(inside.mean())

    def load(self, kind: WorkerKind, role: Role) -> PoolLoad | None:
        """Return a kind of workers under the demand; None where the model does not fit."""
        key = (role, kind)
        if key not in self._loads:
            performance, demand = self.performance(kind, role), self.demand
            self._loads[key] = (
                None
                if performance is None
                else PoolLoad(performance, role, demand.classes, demand.mix.arrival_scv)
            )
        return self._loads[key]

    def workers_for(self, role: Role, kind: WorkerKind, room: int) -> int | None:
        """Return the fewest workers of a kind that hold the rate; None where `room` does not."""
        if self.limit_rps(role, kind, room) < self.demand.rate_rps:
            return None
        low, high = 0, room
        while high - low > 1:
            middle = (low + high) // 2
            enough = self.limit_rps(role, kind, middle) >= self.demand.rate_rps
            low, high = (low, middle) if enough else (middle, high)
        return high

    # --- figures --------------------------------------------------------------------------------

    def figures(self, configuration: Configuration, rate_rps: float) -> LoadFigures:
        """Return a configuration's figures at a rate, latencies at the objective's percentile."""
        self._replayed(configuration, rate_rps)  # tells how long requests live
        return self.priced(
            configuration, rate_rps, self._replayed(configuration, rate_rps)[:3], None
        )

    def priced(
        self, configuration: Configuration, rate_rps: float, latencies: tuple[float, float, float],
        attained: float | None,
    ) -> LoadFigures:  # fmt: skip
        """Return figures with throughput and cost; `latencies`: TTFT, ITL, mean E2E, in seconds."""
        tok_s = rate_rps * self.demand.mix.osl
        usd = None
        if self.usd_per_hour and tok_s > 0:
            usd = usd_per_million_at(self.usd_per_hour_of(configuration), 1, tok_s)
        per_gpu = tok_s / configuration.total_gpus
        return LoadFigures(rate_rps, *latencies, attained, per_gpu, usd)

    def usd_per_hour_of(self, configuration: Configuration) -> float:
        """Return the price of a configuration; without prices the GPUs themselves are counted."""
        return sum(
            count * self.usd_per_hour.get(name, 1.0) for name, count in configuration.gpus.items()
        )
