"""What simulated workers run on, where their own configuration does not say."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from pigou.config import ConfigError


class TierConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A tier of a worker, and its link to the one above.

    Attributes:
        name: that reports give it; `host` is memory, what has another name outlives its worker.
        gib: of KV blocks, 2^30 bytes each.
        gbps: gigabits a second, each way; moves take their turns.
        latency_us: microseconds until the first byte.
        policy: what it gives up first, as registered under `pigou.eviction`.
        params: of the policy.
    """

    name: str
    gib: float
    gbps: float = 200.0
    latency_us: float = 20.0
    policy: str = "price"
    params: dict[str, float] = {}

    def __post_init__(self) -> None:
        """Refuse tiers that nothing fits in, and links that never deliver."""
        for name in ("gib", "gbps"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ConfigError(f"tier {self.name}: {name} is {getattr(self, name)}; it must be "
                                  "above 0")  # fmt: skip
        if not 0.0 <= self.latency_us < math.inf:
            raise ConfigError(f"tier {self.name}: latency_us is {self.latency_us}; at least 0")

    def seconds(self, size: int) -> float:
        """Return the seconds of `size` bytes on its link, without latency."""
        return size * 8e-9 / self.gbps


class Setup(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What workers run on, where their own configuration does not say.

    Attributes:
        model: its name, or a `config.json`.
        gpu: its name.
        tp: GPUs of a worker.
        timing: `law:...`, `roofline`, `profile:FOLDER`.
        blocks: KV blocks of a worker; 0 takes those of the measured worker, or computes them from
            the GPU's memory.
        max_batched_tokens: of a step.
        max_seqs: that run at once.
        max_model_len: most tokens of a sequence; 0 for the workload's longest.
        engine: whose ways the workers have. `vllm`: a step is decided when the one before it
            begins (asynchronous scheduling), and a request is admitted as soon as its blocks are
            free. `pigou`: a step is decided when the one before it ended, and a block is left for
            each running sequence.
        tiers: of a worker beyond its device, from the nearest on.
        tier_recall: bring back what a session needs before it is expected to go on.
        peer_reads: workers of one tp read from each other's caches where that is cheaper; None
            for the engine's ways: `pigou` does, `vllm` cannot.
        rehearses: workers measure their speed before they are ready, and tell the control plane;
            None for the engine's ways: `pigou` does, `vllm` does not.
    """

    model: str = ""
    gpu: str = ""
    tp: int = 1
    timing: str = "roofline"
    blocks: int = 0
    max_batched_tokens: int = 2048
    max_seqs: int = 256
    max_model_len: int = 0
    engine: Literal["vllm", "pigou"] = "vllm"
    tiers: tuple[TierConfig, ...] = ()
    tier_recall: bool = True
    peer_reads: bool | None = None
    rehearses: bool | None = None
