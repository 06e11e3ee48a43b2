"""What a worker costs for a second, and who pays."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pigou.cost.energy import PowerModel
from pigou.cost.usage import Usage


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
