"""What simulated workers run on, and the cells that `pigou sweep` measures."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from pigou.config import LANE_HELP, ConfigError, QueueOrder, check_bounds, option
from pigou.kv.tier_config import TierOption
from pigou.models.parallelism import ParallelOptions

_Number = TypeVar("_Number", int, float)
_GROUP = "Tables"
_MAX_CELLS = 10_000


class TierConfig(TierOption, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A tier of a worker, and its link to the one above."""

    gbps: float = 200.0  # Gb/s each way; transfers are serialised
    latency_us: float = 20.0  # microseconds until the first byte

    def __post_init__(self) -> None:
        TierOption.__post_init__(self)
        if not 0.0 < self.gbps < math.inf:
            raise ConfigError(f"tier {self.name}: gbps is {self.gbps}; it must be above 0")
        if not 0.0 <= self.latency_us < math.inf:
            raise ConfigError(f"tier {self.name}: latency_us is {self.latency_us}; at least 0")

    def seconds(self, size: int) -> float:
        """Return the seconds of `size` bytes on its link, without latency."""
        return size * 8e-9 / self.gbps


class Setup(ParallelOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Default hardware and limits of workers."""

    model: Annotated[str, option("Model: llama-3.1-8b ..., or a config.json.", "Fleet")] = ""
    gpu: Annotated[str, option("GPU: A100, H100, H200, B200, RTX4090 ..., or cpu.", "Fleet")] = ""
    tp: Annotated[int, option("GPUs that share each layer (tensor parallelism).", "Fleet")] = 1
    expert_load: Annotated[
        str,
        option(
            "Loads of the experts: uniform, zipf:EXPONENT, or a FILE.json with a number for each "
            "expert, or a list of them for each layer.",
            "Parallelism",
        ),
    ] = ""
    eplb: Annotated[
        bool,
        option(
            "Balance experts over GPUs by their loads.", "Parallelism",
            flags=("--enable-eplb/--no-enable-eplb",),
        ),
    ] = False  # fmt: skip
    kv_dtype: Annotated[
        str,
        option("Number format of the KV cache: fp8, bfloat16; by default the model's.", "Fleet"),
    ] = ""
    timing: Annotated[
        str,
        option(
            "Timing model: roofline, profile:FOLDER, law:340b, law:itl_a=..,itl_b=..,prefill=.., "
            "or FILE.json of `pigou profile`.",
            "Fleet",
        ),
    ] = "roofline"
    blocks: Annotated[
        int,
        option("KV blocks per worker; 0 uses the profiled worker's, or computes them.", "Fleet"),
    ] = 0
    max_batched_tokens: Annotated[int, option("Maximum of tokens per step.", "Fleet")] = 2048
    max_seqs: Annotated[int, option("Maximum of sequences per step.", "Fleet")] = 256
    max_model_len: Annotated[
        int, option("Maximum of tokens per sequence; 0 uses the workload's longest.", "Fleet")
    ] = 0
    engine: Annotated[
        Literal["vllm", "pigou"],
        option(
            "Engine to imitate: vllm (steps decided ahead, no blocks kept back) or pigou.",
            "Fleet",
        ),
    ] = "vllm"
    order: Annotated[
        QueueOrder | None,
        option(
            "Scheduling order of each worker: fcfs, priority, edf or shortest (fewest predicted "
            "and uncached tokens).  [default: fcfs with --engine vllm, else priority]",
            "Fleet",
        ),
    ] = None
    ageing: Annotated[
        float,
        option("Tokens by which --order shortest favours each second of waiting.", "Fleet"),
    ] = 125.0
    input_weight: Annotated[
        float,
        option("Output tokens that --order shortest counts an uncached one as.", "Fleet"),
    ] = 0.05
    long_lane: Annotated[str, option(LANE_HELP, "Fleet")] = ""
    tiers: Annotated[
        tuple[TierConfig, ...],
        option(
            "KV tier of each worker beyond its device, nearest first: NAME=SIZE[,gbps=200]"
            "[,latency_us=20][,policy=price], as host=64GiB. Repeatable.",
            "Fleet",
            name="tier",
            form="entries",
        ),
    ] = ()
    tier_recall: Annotated[
        bool, option("Prefetch a session's blocks before its next request is expected.", "Fleet")
    ] = True
    kv_quotas: Annotated[
        tuple[str, ...],
        option(
            "Shares of each worker's KV blocks and tiers, TENANT=FLOOR:CEILING from 0 to 1; tenant "
            "* is each other one of the workload. Repeatable.",
            "Fleet",
            name="kv_quota",
        ),
    ] = ()
    speculation: Annotated[
        str,
        option(
            "Draft tokens: acceptance=A[,num_speculative_tokens=4][,cost=C], C the draft model's "
            "step in steps of the model (0: n-grams).",
            "Fleet",
        ),
    ] = ""
    peer_reads: Annotated[
        bool | None,
        option(
            "Let workers read prompt prefixes from other workers' caches.  [default: with "
            "--engine pigou only, as in vLLM]",
            "Routing",
            flags=("--peer-reads/--no-peer-reads",),
        ),
    ] = None
    rehearses: Annotated[
        bool | None,
        option(
            "Startup profiling: workers measure their own speed before they are ready.  [default: "
            "with --engine pigou only, as in vLLM]",
            "Fleet",
            flags=("--rehearses/--no-rehearses",),
        ),
    ] = None
    prefill_queue: Annotated[
        dict[str, Any],
        option(
            "Delivery to prefill workers: push (routed there), or pull[,parameter=value]... (idle "
            "workers claim prompts: order=price or fifo, batch_tokens, max_bypass ...).",
            "Routing",
            form="named",
            key="mode",
        ),
    ] = msgspec.field(default_factory=lambda: {"mode": "push"})
    prices: Annotated[
        str,
        option(
            "Prices of GPUs and tiers: default, or H100=2.5,dram=3,... in dollars per GPU-hour "
            "and per gigabyte-month; adds cost and energy to the figures.",
            "Results",
        ),
    ] = ""


class SweepConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Cells of the tables, each a simulation. Lists are numbers with commas."""

    isl: Annotated[
        str, option("Prompt lengths in tokens, as 512,2048.", _GROUP, flags=("--input", "--isl"))
    ] = "256,1024,4096"
    workers: Annotated[str, option("Sizes of the prefill pool.", _GROUP)] = "1,2,4"
    utilisation: Annotated[
        str, option("Loads of the prefill pool, as shares of its capacity.", _GROUP)
    ] = "0.3,0.5,0.7,0.8,0.9"
    requests: Annotated[int, option("Requests per prefill load.", _GROUP)] = 400
    concurrency: Annotated[
        str, option("Concurrent users of one decode worker, up to --max-seqs.", _GROUP)
    ] = "1,4,16,64,256"
    contexts: Annotated[str, option("Mean contexts of its streams, in tokens.", _GROUP)] = (
        "512,2048,8192"
    )
    osl: Annotated[
        int, option("Output tokens per decode request.", _GROUP, flags=("--output", "--osl"))
    ] = 128
    seed: Annotated[int, option("Seed of arrivals.", _GROUP)] = 0

    def __post_init__(self) -> None:
        cells = len(self.isls) * len(self.pool_sizes) * len(self.utilisations)
        cells += len(self.user_counts) * len(self.context_tokens)
        if cells > _MAX_CELLS:
            raise ConfigError(f"isl gives {cells:,} cells with the others; at most {_MAX_CELLS:,}")
        check_bounds("requests", self.requests, ge=10, le=1_000_000)
        check_bounds("osl", self.osl, ge=2, le=100_000)
        if min(self.context_tokens) <= self.osl // 2:
            raise ConfigError(
                f"contexts is {self.contexts!r}; each must be above half of osl, {self.osl // 2}"
            )

    @property
    def isls(self) -> tuple[int, ...]:
        """Prompt tokens, rising."""
        return _numbers("isl", self.isl, int, 1, 10_000_000)

    @property
    def pool_sizes(self) -> tuple[int, ...]:
        """Workers of the prefill pool, rising."""
        return _numbers("workers", self.workers, int, 1, 256)

    @property
    def utilisations(self) -> tuple[float, ...]:
        """Loads, rising."""
        return _numbers("utilisation", self.utilisation, float, 0.01, 0.99)

    @property
    def user_counts(self) -> tuple[int, ...]:
        """Users of one decode worker, rising."""
        return _numbers("concurrency", self.concurrency, int, 1, 100_000)

    @property
    def context_tokens(self) -> tuple[int, ...]:
        """Context lengths in tokens, rising."""
        return _numbers("contexts", self.contexts, int, 2, 10_000_000)

    def decode_cells(self, max_seqs: int, kv_tokens: float) -> list[tuple[int, int]]:
        """Return (users, tokens each) of the cells that fit a worker."""
        return [
            (users, context)
            for context in self.context_tokens
            for users in self.user_counts
            if users <= max_seqs and users * (context + self.osl) <= kv_tokens
        ]


def _numbers(
    name: str, text: str, kind: Callable[[str], _Number], low: float, high: float
) -> tuple[_Number, ...]:
    try:
        values = sorted({kind(part) for part in text.split(",")})
    except ValueError:
        raise ConfigError(f"{name} is {text!r}; write numbers with commas") from None
    if not low <= values[0] <= values[-1] <= high:
        raise ConfigError(f"{name} is {text!r}; each must be {low:g} to {high:g}")
    return tuple(values)
