"""Observations of a fleet: what its gateway and workers show in one window of time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from pigou.config import ConfigError


class WorkerObservation(
    msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True, forbid_unknown_fields=True
):
    """A worker in one window; figures are None where they are not known."""

    worker: str  # its id
    role: str = "both"
    restarts: int = 0  # times that its process ended and was started anew
    out_of_memory: int = 0  # deaths or errors for want of memory (exit 137, an allocator's error)
    running: float = 0.0  # requests, in the mean
    waiting: float = 0.0
    knee: float | None = None  # running requests at which a token takes twice as long as alone
    busy: float | None = None  # share of the window that it computed
    kv_tokens: int = 0  # tokens that its KV pool holds
    # share of the pool in use, in the mean; cached blocks that nobody uses are free.
    kv_usage: float | None = None
    wasted_tokens: float | None = None  # room in used blocks that holds no token, in the mean
    allocation_failures: int = 0  # allocations that failed although blocks were free
    # KV held for over 30 s by requests that compute nothing, in the mean.
    idle_tokens: float | None = None
    preemptions: int | None = None
    queried_tokens: int = 0  # prompt tokens that were looked up in the prefix cache
    hit_tokens: int = 0
    prefill_tokens: int = 0  # prompt tokens that were computed, in so many steps and seconds
    prefill_steps: int | None = None
    prefill_s: float | None = None
    output_tokens: int = 0
    decode_stall_s: float | None = None  # the longest step without a prompt in it
    restores: int = 0  # reads from tiers
    slow_restores: int | None = None  # those that took longer than to recompute
    link_busy: float | None = None  # share of the window that the busiest link to a tier was busy
    adapter_loads: int | None = None
    adapter_load_s: float = 0.0


class TenantObservation(
    msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True, forbid_unknown_fields=True
):
    """A tenant in one window."""

    tenant: str
    weight: float = 1.0  # in fair order
    tokens: float = 0.0
    kv_token_s: float | None = None  # tokens of KV that it held, times seconds
    waiting: float = 0.0


class FleetObservation(
    msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True, forbid_unknown_fields=True
):
    """A fleet in one window; figures are None where they are not known.

    Waits are from the arrival until a worker begins to compute. A prompt is long if it is among
    the longest tenth and has over four times the median's tokens.
    """

    start_s: float  # from any zero that all windows of a series share
    seconds: float
    arrived: int = 0  # attempts of clients
    completed: int = 0
    failed: int = 0  # that ended in an error of the fleet (5xx, no refusal)
    refused: int = 0
    repeated: int | None = None  # that came again within 60 s after an attempt that was not served
    queued: float = 0.0  # requests that waited at the gateway, in the mean
    ttft_p50_s: float | None = None  # median time to first token
    itl_p50_s: float | None = None  # of the gaps between tokens
    itl_p99_s: float | None = None
    # streams whose client took nothing for ten times the median gap and more.
    client_stalls: int | None = None
    engine_stalls: int = 0  # such gaps in which no token was produced
    engine_stall_s: float | None = None  # their mean
    wait_p50_s: float | None = None  # median wait of those that began
    short_wait_p50_s: float | None = None  # waits of prompts that are not long
    short_wait_p95_s: float | None = None
    long_wait_max_s: float | None = None  # the longest wait of a long prompt so far, begun or not
    longest_prompt_tokens: int | None = None
    answer_hits: int | None = None  # answers out of a semantic cache
    stale_answer_hits: int = 0  # those older than their sources
    feedbacks: int = 0  # answers that users judged
    downvotes: int = 0
    workers: tuple[WorkerObservation, ...] = ()
    tenants: tuple[TenantObservation, ...] = ()

    @property
    def waiting(self) -> float:
        """Requests that wait, at the gateway and at workers, in the mean."""
        return self.queued + sum(worker.waiting for worker in self.workers)

    @property
    def running(self) -> float:
        """Requests that run, in the mean."""
        return sum(worker.running for worker in self.workers)

    @property
    def decoders(self) -> Iterator[WorkerObservation]:
        """Workers that stream tokens."""
        return (worker for worker in self.workers if worker.role != "prefill")

    def total(self, name: str) -> float | None:
        """Return the sum of an attribute over the workers that say it; None where none does."""
        values = [value for worker in self.workers if (value := getattr(worker, name)) is not None]
        return sum(values) if values else None


def read_observations(windows: object, source: str) -> tuple[FleetObservation, ...]:
    """Return the windows of a document.

    Raises:
        ConfigError: they are none, are not in order, or lack length; a figure is below 0.
    """
    try:
        series = msgspec.convert(windows, tuple[FleetObservation, ...])
    except msgspec.ValidationError as error:
        raise ConfigError(f"diagnose: windows of {source}: {error}") from None
    if not series:
        raise ConfigError(f"diagnose: {source} has no windows; the run was too short for one")
    for window in series:
        for part in (window, *window.workers, *window.tenants):
            for name in part.__struct_fields__:
                value = getattr(part, name)
                if name != "start_s" and isinstance(value, int | float) and value < 0:
                    raise ConfigError(
                        f"diagnose: windows of {source}: {name} is {value} at {window.start_s:g} s;"
                        " it must be at least 0"
                    )
    for before, window in zip((None, *series), series, strict=False):
        if not window.seconds > 0:
            raise ConfigError(
                f"diagnose: windows of {source}: seconds is {window.seconds}; it must be above 0"
            )
        if before is not None and window.start_s < before.start_s:
            raise ConfigError(
                f"diagnose: windows of {source}: start_s is {window.start_s} after "
                f"{before.start_s}; write them in the order of time"
            )
    return series


def written(series: Iterable[FleetObservation]) -> list[Any]:
    """Return windows as JSON has them, numbers rounded to six digits."""
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
