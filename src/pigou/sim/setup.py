"""What simulated workers run on, where their own configuration does not say."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import msgspec

from pigou.config import ConfigError
from pigou.config_option import option


class TierConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A tier of a worker, and its link to the one above."""

    name: str  # that reports give it; `host` is memory, what has another name outlives its worker
    gib: float  # of KV blocks, 2^30 bytes each
    gbps: float = 200.0  # gigabits a second, each way; moves take their turns
    latency_us: float = 20.0  # microseconds until the first byte
    policy: str = "price"  # of its eviction, as registered under `pigou.eviction`
    params: dict[str, float] = {}

    def __post_init__(self) -> None:
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
    """What workers run on, where their own configuration does not say."""

    model: Annotated[str, option("llama-3.1-8b ..., or a config.json.", "Fleet")] = ""
    gpu: Annotated[str, option("A100, H100, H200, B200, RTX4090 ..., or cpu.", "Fleet")] = ""
    tp: Annotated[int, option("GPUs of each worker.", "Fleet")] = 1
    kv_dtype: Annotated[
        str,
        option("Number format of the KV cache: fp8, bfloat16; by default the model's.", "Fleet"),
    ] = ""
    timing: Annotated[
        str,
        option(
            "roofline, profile:FOLDER, law:340b, law:itl_a=..,itl_b=..,prefill=.., or FILE.json "
            "of `pigou profile`",
            "Fleet",
        ),
    ] = "roofline"
    blocks: Annotated[
        int,
        option("KV blocks of a worker; 0 takes the profiled worker's, or computes them.", "Fleet"),
    ] = 0
    max_batched_tokens: Annotated[int, option("Tokens of a step.", "Fleet")] = 2048
    max_seqs: Annotated[int, option("Sequences of a step.", "Fleet")] = 256
    max_model_len: Annotated[
        int, option("Tokens of a sequence; 0 takes the workload's longest.", "Fleet")
    ] = 0
    engine: Annotated[
        Literal["vllm", "pigou"],
        option(
            "Whose ways workers have: vllm (steps decided ahead, no blocks kept back), pigou.",
            "Fleet",
        ),
    ] = "vllm"
    tiers: Annotated[
        tuple[TierConfig, ...],
        option(
            "A tier of each worker beyond its device, nearest first: "
            "NAME,gib=64[,gbps=200][,latency_us=20][,policy=price]; may be given again.",
            "Fleet",
            name="tier",
            form="entries",
        ),
    ] = ()
    tier_recall: Annotated[
        bool, option("Bring back what a session needs before it is expected.", "Fleet")
    ] = True
    peer_reads: Annotated[
        bool | None,
        option(
            "Let workers read a prompt's beginning from another one's cache.  [default: with "
            "--engine pigou; a vLLM lends nothing]",
            "Routing",
            flags=("--peer-reads/--no-peer-reads",),
        ),
    ] = None
    rehearses: Annotated[
        bool | None,
        option(
            "Let workers measure their speed before they are ready, and tell it. [default: with "
            "--engine pigou; a vLLM does not]",
            "Fleet",
            flags=("--rehearses/--no-rehearses",),
        ),
    ] = None
    prefill_queue: Annotated[
        dict[str, Any],
        option(
            "How prompts get to prefill workers: push (routed there), or pull[,parameter=value]... "
            "(idle workers claim them: order=price or fifo, batch_tokens, max_bypass ...).",
            "Routing",
            form="named",
            key="mode",
        ),
    ] = msgspec.field(default_factory=lambda: {"mode": "push"})
    prices: Annotated[
        str,
        option(
            "What GPUs and tiers cost: default, or H100=2.5,dram=3,... in dollars of a GPU-hour "
            "and of a gigabyte-month; the figures get cost and energy.",
            "Results",
        ),
    ] = ""
