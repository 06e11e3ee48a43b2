"""Observations of a fleet: figures of gateway and workers in one window."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from pigou.config import ConfigError


class WorkerObservation(
    msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True, forbid_unknown_fields=True
):
    """A worker in one window; None means unknown."""

    worker: str  # worker id
    role: str = "both"
    restarts: int = 0  # restarts of its process
    out_of_memory: int = 0  # OOM deaths and errors (exit 137, an allocator's error)
    running: float = 0.0  # mean requests
    waiting: float = 0.0
    knee: float | None = None  # running requests at which ITL is twice that of one
    busy: float | None = None  # share of the window spent computing
    kv_tokens: int = 0  # KV pool capacity
    kv_usage: float | None = None  # mean share of the pool in use; unused cached blocks are free
    wasted_tokens: float | None = None  # mean empty slots in used blocks
    allocation_failures: int = 0  # failed although blocks were free
    idle_tokens: float | None = None  # mean KV held over 5 s that nothing computes with
    idle_tenant: str = ""  # tenant that holds most of it
    preemptions: int | None = None
    queried_tokens: int = 0  # prompt tokens looked up in the prefix cache
    hit_tokens: int = 0
    prefill_tokens: int = 0  # computed prompt tokens, in these steps and seconds
    prefill_steps: int | None = None
    prefill_s: float | None = None
    output_tokens: int = 0
    decode_stall_s: float | None = None  # longest step without prefill
    restores: int = 0  # reads from tiers
    slow_restores: int | None = None  # slower than recomputing
    link_busy: float | None = None  # busy share of the busiest link to a tier
    adapter_loads: int | None = None
    adapter_load_s: float = 0.0


class TenantObservation(
    msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True, forbid_unknown_fields=True
):
    """A tenant in one window."""

    tenant: str
    weight: float = 1.0  # in fair queueing
    tokens: float = 0.0
    kv_token_s: float | None = None  # held KV token-seconds
    waiting: float = 0.0


class FleetObservation(
    msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True, forbid_unknown_fields=True
):
    """A fleet in one window (None: unknown); waits last from arrival until computation."""

    start_s: float  # from any zero shared by a series
    seconds: float
    arrived: int = 0  # client attempts
    completed: int = 0
    failed: int = 0  # ended in a fleet error (5xx, not refused)
    refused: int = 0
    repeated: int | None = None  # retried within 60 s after an unserved attempt
    queued: float = 0.0  # mean requests queued at the gateway
    ttft_p50_s: float | None = None
    itl_p50_s: float | None = None  # median gap between tokens
    itl_p99_s: float | None = None
    client_stalls: int | None = None  # streams whose client read nothing for ten median gaps
    engine_stalls: int = 0  # such gaps without a produced token
    engine_stall_s: float | None = None  # their mean
    wait_p50_s: float | None = None  # median wait of requests that began
    short_wait_p50_s: float | None = None  # median wait of prompts that are not long
    short_wait_p95_s: float | None = None
    long_wait_max_s: float | None = None  # longest wait of a long prompt so far, begun or not
    starving_lanes: int = 0  # lanes whose first request waits while others are served
    longest_prompt_tokens: int | None = None
    answer_hits: int | None = None  # answers from a semantic cache
    stale_answer_hits: int = 0  # older than their sources
    feedbacks: int = 0  # answers rated by users
    downvotes: int = 0
    workers: tuple[WorkerObservation, ...] = ()
    tenants: tuple[TenantObservation, ...] = ()

    @property
    def waiting(self) -> float:
        """Mean waiting requests, at the gateway and at workers."""
        return self.queued + sum(worker.waiting for worker in self.workers)

    @property
    def running(self) -> float:
        """Mean running requests."""
        return sum(worker.running for worker in self.workers)

    @property
    def decoders(self) -> Iterator[WorkerObservation]:
        """Workers that decode."""
        return (worker for worker in self.workers if worker.role != "prefill")

    def total(self, name: str) -> float | None:
        """Return the sum of an attribute over workers that report it; None if none does."""
        values = [value for worker in self.workers if (value := getattr(worker, name)) is not None]
        return sum(values) if values else None


def read_observations(windows: object, source: str) -> tuple[FleetObservation, ...]:
    """Return a document's windows; raises ConfigError for none, disorder or bad figures."""
    try:
        series = msgspec.convert(windows, tuple[FleetObservation, ...])
    except msgspec.ValidationError as error:
        raise ConfigError(f"windows of {source}: {error}") from None
    if not series:
        raise ConfigError(f"{source} has no windows; the run was too short for one")
    for window in series:
        for part in (window, *window.workers, *window.tenants):
            for name in part.__struct_fields__:
                value = getattr(part, name)
                if name != "start_s" and isinstance(value, int | float) and value < 0:
                    raise ConfigError(
                        f"windows of {source}: {name} is {value} at {window.start_s:g} s;"
                        " it must be at least 0"
                    )
    for before, window in zip((None, *series), series, strict=False):
        if not window.seconds > 0:
            raise ConfigError(
                f"windows of {source}: seconds is {window.seconds}; it must be above 0"
            )
        if before is not None and window.start_s < before.start_s:
            raise ConfigError(
                f"windows of {source}: start_s is {window.start_s} after "
                f"{before.start_s}; write them in the order of time"
            )
    return series


def written(series: Iterable[FleetObservation]) -> list[Any]:
    """Return windows as JSON builtins, rounded to six digits."""
    rounded: list[Any] = _rounded(msgspec.to_builtins(list(series)))
    return rounded


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value
