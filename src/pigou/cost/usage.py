"""Usage: requests' share of the fleet and its cost, and the rates of workers."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from pigou.models.gpus import PowerModel


def usd_per_million(usd: float, tokens: float) -> float | None:
    """Return dollars per million tokens; None for no tokens."""
    return usd / tokens * 1e6 if tokens > 0 else None


def usd_per_million_at(
    usd_per_gpu_hour: float, gpus: float, tok_s: float, attained: float = 1.0
) -> float:
    """Return dollars per million tokens served inside the objective (`attained` share above 0)."""
    return usd_per_gpu_hour * gpus / 3600.0 / tok_s * 1e6 / attained


class UsageKey(NamedTuple):
    """Owner of a usage."""

    tenant: str
    model: str
    workload: str  # request class


@dataclass(slots=True)
class Usage:
    """Tokens, GPU-seconds, dollars and joules of some requests so far."""

    requests: int = 0
    sequences: int = 0
    uncached_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    read_tokens: int = 0  # KV moved between workers: remote reads, and prompts prefilled elsewhere
    kv_token_s: float = 0.0  # KV tokens times seconds held; a shared prefix costs each holder 1/k
    # cached tokens of anybody that will be computed again, for what was written (memory price).
    displaced_tokens: float = 0.0
    prefill_gpu_s: float = 0.0  # GPU-seconds
    restore_gpu_s: float = 0.0  # GPU-seconds of reading cached prefixes
    decode_gpu_s: float = 0.0
    prefill_usd: float = 0.0
    restore_usd: float = 0.0
    decode_usd: float = 0.0
    # added by these requests: whole prompts, and their own reads in decode steps
    marginal_usd: float = 0.0
    prefill_joules: float = 0.0  # restoring included
    decode_joules: float = 0.0

    @property
    def usd(self) -> float:
        """Dollars of busy GPUs."""
        return self.prefill_usd + self.restore_usd + self.decode_usd

    @property
    def joules(self) -> float:
        """Joules of busy GPUs."""
        return self.prefill_joules + self.decode_joules

    def add(self, other: Usage) -> None:
        """Add another usage to this one."""
        for field in fields(self):
            name = field.name
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def document(self) -> dict[str, Any]:
        """Return JSON builtins, with dollars per million tokens of each kind."""
        figures = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            **figures,
            "usage_usd": self.usd,
            "joules": self.joules,
            "usd_per_million": {
                "uncached_input": usd_per_million(self.prefill_usd, self.uncached_tokens),
                "output": usd_per_million(self.decode_usd, self.output_tokens),
            },
            "joules_per_output_token": (
                self.joules / self.output_tokens if self.output_tokens else None
            ),
        }


def total(usages: list[Usage]) -> Usage:
    """Return the sum of usages."""
    whole = Usage()
    for usage in usages:
        whole.add(usage)
    return whole


@dataclass(frozen=True, slots=True)
class WorkerRate:
    """Price of a worker, and inputs of its energy estimate."""

    usd_per_s: float
    storage_usd_per_s: float = 0.0
    gpus: int = 1  # number of GPUs
    power: PowerModel | None = None  # per GPU; None if unknown
    weight_bytes: float = 0.0  # read in each step; 0 if unknown
    kv_bytes: float = 0.0  # per token of KV cache; 0 if unknown
    bytes_per_s: float = 0.0  # memory bandwidth of all GPUs
    flops: float = 0.0  # peak FLOP/s of all GPUs
    token_flops: float = 0.0  # FLOPs per prompt token

    @property
    def weight_tokens(self) -> float:
        """Weights in tokens of KV; infinite if either is unknown."""
        known = self.weight_bytes > 0 and self.kv_bytes > 0
        return self.weight_bytes / self.kv_bytes if known else math.inf


@dataclass(slots=True)
class Payer:
    """Accounts that a request is charged to: its own, and its tenant's."""

    usages: tuple[Usage, ...]

    def add(self, name: str, value: float) -> None:
        """Add `value` to the named figure of all accounts."""
        for usage in self.usages:
            setattr(usage, name, getattr(usage, name) + value)
