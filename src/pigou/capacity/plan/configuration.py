"""Configurations of a fleet: what a plan compares."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from pigou.request import Role
from pigou.sim.fleet_config import FleetConfig, WorkerGroup
from pigou.sim.network import LinkConfig


class WorkerKind(msgspec.Struct, frozen=True, kw_only=True):
    """Workers that are alike."""

    gpu: str
    tp: int  # GPUs of a worker
    kv_dtype: str  # number format of the KV cache; "" for the model's own
    max_seqs: int  # sequences of a step at most: the batch
    chunk: int  # tokens of a step at most


class PlannedPool(msgspec.Struct, frozen=True, kw_only=True):
    """Workers of one role and kind."""

    role: Role
    kind: WorkerKind
    workers: int

    @property
    def gpus(self) -> int:
        """GPUs of all of them."""
        return self.workers * self.kind.tp


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
        """GPUs of a worker, by role."""
        return {pool.role.value: pool.kind.tp for pool in self.pools}

    @property
    def batch(self) -> dict[str, int]:
        """Sequences of a step at most, by role."""
        return {pool.role.value: pool.kind.max_seqs for pool in self.pools}

    @property
    def workers_key(self) -> tuple[object, ...]:
        """The same for fleets that differ by batches and steps only."""
        return (self.name, *self.tp.values(), self.kv_dtype, *self.gpus)

    def fleet(self, link: LinkConfig) -> FleetConfig:
        """Return the fleet for a simulation."""
        groups = tuple(
            WorkerGroup(
                role=pool.role, count=pool.workers, gpu=pool.kind.gpu, tp=pool.kind.tp,
                max_seqs=pool.kind.max_seqs, max_batched_tokens=pool.kind.chunk,
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
    # share of the offered requests inside the objective; None where only the percentiles are known.
    attained: float | None
    output_tok_s_per_gpu: float  # output tokens a second
    usd_per_million_output: float | None  # of GPU time; None without prices
