"""Usage: what requests took of the fleet, what that costs, and the rates of its workers."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from pigou.cost.energy import PowerModel


def usd_per_million(usd: float, tokens: float) -> float:
    """Return dollars for a million tokens; NaN for no tokens."""
    return usd / tokens * 1e6 if tokens > 0 else math.nan


def usd_per_million_at(
    usd_per_gpu_hour: float, gpus: float, tok_s: float, attained: float = 1.0
) -> float:
    """Return dollars for a million tokens that are served inside the objective.

    Price of a GPU-hour x GPUs / 3600 / (tokens a second) x 10^6 / attained share.

    Args:
        tok_s: tokens a second of all.
        attained: share of the requests inside the objective, above 0.
    """
    return usd_per_million(usd_per_gpu_hour * gpus / 3600.0, tok_s) / attained


def number_or_none(value: float) -> float | None:
    """Return a number as JSON has it: None for NaN."""
    return None if math.isnan(value) else value


class UsageKey(NamedTuple):
    """Whose usage it is."""

    tenant: str
    model: str
    workload: str  # their class


@dataclass(slots=True)
class Usage:
    """Tokens, GPU-seconds, dollars and joules of some requests, so far."""

    requests: int = 0
    uncached_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    prefill_gpu_s: float = 0.0  # GPUs x seconds of prompts
    restore_gpu_s: float = 0.0  # of reading their cached beginning
    decode_gpu_s: float = 0.0  # of streams
    prefill_usd: float = 0.0
    restore_usd: float = 0.0
    decode_usd: float = 0.0
    # what these requests added: prompts whole, of steps what was read for them.
    marginal_usd: float = 0.0
    prefill_joules: float = 0.0  # restoring included
    decode_joules: float = 0.0

    @property
    def usd(self) -> float:
        """Dollars of GPUs in use."""
        return self.prefill_usd + self.restore_usd + self.decode_usd

    @property
    def joules(self) -> float:
        """Energy of GPUs in use."""
        return self.prefill_joules + self.decode_joules

    def add(self, other: Usage) -> None:
        """Add another usage to this one."""
        for field in fields(self):
            name = field.name
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def document(self) -> dict[str, Any]:
        """Return it as JSON builtins, with dollars for a million tokens of each kind."""
        figures = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            **figures,
            "usage_usd": self.usd,
            "joules": self.joules,
            "usd_per_million": {
                "uncached_input": number_or_none(
                    usd_per_million(self.prefill_usd, self.uncached_tokens)
                ),
                "output": number_or_none(usd_per_million(self.decode_usd, self.output_tokens)),
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
    """What a worker costs, and what its energy is estimated from."""

    usd_per_s: float
    storage_usd_per_s: float = 0.0
    gpus: int = 1  # their number
    power: PowerModel | None = None  # of each; None where it is not known
    weight_bytes: float = 0.0  # read in each step; 0 where it is not known
    kv_bytes: float = 0.0  # of one token in the KV cache; 0 where it is not known
    bytes_per_s: float = 0.0  # memory bandwidth of all its GPUs
    flops: float = 0.0  # peak FLOP/s of all of them
    token_flops: float = 0.0  # FLOPs of one token of a prompt

    @property
    def weight_tokens(self) -> float:
        """Return the weights in tokens of KV; infinite where either is not known."""
        known = self.weight_bytes > 0 and self.kv_bytes > 0
        return self.weight_bytes / self.kv_bytes if known else math.inf


@dataclass(slots=True)
class Payer:
    """Who pays for a request: its own usage, and that of its tenant, model and class."""

    usages: tuple[Usage, ...]

    def add(self, name: str, value: float) -> None:
        """Add to a figure of all of them."""
        for usage in self.usages:
            setattr(usage, name, getattr(usage, name) + value)
