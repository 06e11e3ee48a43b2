"""GPUs (`gpus.json`): peaks, the share of them that is reached, KV blocks that fit, power.

Peaks are dense and accumulate in float32, by data sheets; efficiencies name their source.

Power is P = P_idle + (P_max - P_idle) u^gamma, with u the utilisation. In decode u is MBU; in
prefill MFU over `FULL_MFU`, at most 1: power peaks below full FLOP/s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files

import msgspec

from pigou.config import ConfigError, check_bounds
from pigou.models.architecture import Architecture
from pigou.models.parallelism import ParallelConfig, parallel_config
from pigou.models.quantisation import DTYPE_BYTES

TERA, GIGA, GIB = 1e12, 1e9, 2**30
#: Bytes for each token and word while vLLM's sampler runs on its dummy batch: logits (2), in
#: float32 (4), sorted (4) with their indices (8), probabilities (4), their sums (4), mask (1),
#: scattered back (4).
SAMPLER_BYTES = 31
#: Fitted to half of Splitwise's A100 configurations; decode is off by 4% on the other half (`python
#: -m benchmarks.capacity.energy`). Assumed for other GPUs.
IDLE_SHARE, GAMMA, FULL_MFU = 0.217, 0.79, 0.44


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device."""

    name: str
    flops: Mapping[str, float] = field(hash=False)  # peak FLOP/s by dtype
    bandwidth: float  # peak memory bandwidth in bytes/s
    memory: int  # memory in bytes, as the driver reports it
    link_bandwidth: float  # bytes/s to another device of its node, one way
    link_latency: float  # seconds to the first byte, software included
    compute: float  # share of `flops` reached by large matrix products
    streaming: float  # share of `bandwidth` reached reading weights
    cache: float  # share of `bandwidth` reached reading KV of many short sequences
    attention: float  # share of `flops` reached by attention over prompts
    launch: float = 2e-6  # launch seconds of a kernel in a CUDA graph
    step: float = 0.0  # fixed seconds per step
    source: str = ""
    usd_hour: float = 0.0  # dollars per hour: a round figure, no provider's offer
    max_watts: float = 0.0  # board power limit by data sheet; assumed for `cpu`
    link_gpus: int = 8  # GPUs of an NVLink domain, or the PCIe slots of a host
    network_bandwidth: float = 50e9  # bytes/s to GPUs beyond: one 400 Gb/s port a GPU
    processors: int = 0  # streaming multiprocessors, where FlashAttention 2 runs; 0 elsewhere

    def all_reduce(self, size: float, devices: int) -> float:
        """Seconds to sum `size` bytes in a ring: 2 (p - 1) hops of size / p bytes."""
        hop = self.link_latency + size / devices / self.link_bandwidth
        return 2 * (devices - 1) * hop

    def all_gather(self, size: float, devices: int) -> float:
        """Seconds until each device has all `size` bytes: p - 1 hops of size / p."""
        return (devices - 1) * (self.link_latency + size / devices / self.link_bandwidth)

    def check_tp(self, tp: int) -> None:
        """Raise ConfigError for tensor parallelism beyond the linked devices."""
        if not 1 <= tp <= self.link_gpus:
            raise ConfigError(
                f"tp is {tp}; links of {self.link_bandwidth / GIGA:g} GB/s join {self.link_gpus} "
                f"x {self.name}; give 1 to {self.link_gpus}, and more workers"
            )

    def peak(self, dtype: str) -> float:
        """Peak FLOP/s for weights of a dtype; unsupported ones compute in bfloat16, or float32."""
        for name in (dtype, "bfloat16", "float32"):
            if name in self.flops:
                return self.flops[name]
        raise ConfigError(f"gpu {self.name!r} has no peak for dtype {dtype!r}")


class _GpuRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A row of `gpus.json`, in the units of data sheets."""

    key: str
    name: str
    aliases: list[str] = []  # as `_normalized` writes them, the driver's names among them
    tflops: dict[str, float]  # dense, by number format
    gb_s: float
    memory_gib: float = 0.0
    memory_bytes: int = 0  # overrides `memory_gib`
    link_gb_s: float  # one way; of PCIe with 16 lanes about 80% arrive
    link_latency_s: float
    link_gpus: int = 8
    reached: tuple[float, float, float, float]  # compute, streaming, cache, attention
    launch_s: float = 2e-6
    step_s: float = 0.0
    usd_hour: float
    max_watts: float
    processors: int = 0  # with FlashAttention 2
    source: str

    def gpu(self) -> Gpu:
        return Gpu(
            self.name, {dtype: peak * TERA for dtype, peak in self.tflops.items()},
            self.gb_s * GIGA, self.memory_bytes or int(self.memory_gib * GIB),
            self.link_gb_s * GIGA, self.link_latency_s, *self.reached, launch=self.launch_s,
            step=self.step_s, source=self.source, usd_hour=self.usd_hour,
            max_watts=self.max_watts, link_gpus=self.link_gpus, processors=self.processors,
        )  # fmt: skip


_ROWS = msgspec.json.decode(
    files("pigou.models").joinpath("gpus.json").read_bytes(), type=list[_GpuRow]
)
GPUS = {row.key: row.gpu() for row in _ROWS}


def gpu(name: str) -> Gpu:
    """Find a GPU by name, ignoring case, spaces and dashes; variants are distinct."""
    wanted = _normalized(name)
    for prefix in ("nvidia", "tesla", "geforce", "amd", "instinct"):
        wanted = wanted.removeprefix(prefix)
    for row in _ROWS:
        if wanted in (_normalized(row.key), *row.aliases):
            return GPUS[row.key]
    raise ConfigError(f"gpu is {name!r}; it must be one of {', '.join(GPUS)}")


def _normalized(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


def check_parallel(split: ParallelConfig, model: Architecture, device: Gpu) -> None:
    """Raise ConfigError unless GPUs of this kind can share the model so."""
    if split.tp < 1 or model.heads % split.tp:
        raise ConfigError(f"tp is {split.tp}; it must divide the {model.heads} heads of the model")
    device.check_tp(split.tp)
    if not model.experts and (split.ep or split.dp > 1):
        what = "ep is on" if split.ep else f"dp is {split.dp}"
        raise ConfigError(f"{what}, and {model.name} has no experts; give more workers instead")
    if split.redundant_experts and not split.ep:
        raise ConfigError(
            f"redundant_experts is {split.redundant_experts}, and ep is off; copies need it on"
        )
    slots = model.experts + split.redundant_experts
    if split.ep and slots % split.gpus:
        raise ConfigError(
            f"redundant_experts is {split.redundant_experts}; with the {model.experts} experts "
            f"it must be a multiple of the {split.gpus} GPUs (tp x dp)"
        )


def layer_bytes(hidden: int, wide: float, max_batched_tokens: int) -> int:
    """Return the bytes of a layer's widest moment: residual, its copy, `wide` numbers a token."""
    return int(max_batched_tokens * (2 * hidden + wide) * DTYPE_BYTES["bfloat16"])


def reserve(model: Architecture, tp: int, max_batched_tokens: int, max_seqs: int) -> int:
    """Return the activation bytes of the largest step, kept free on a GPU."""
    layer = layer_bytes(model.hidden, model.wide / tp, max_batched_tokens)
    return layer + max_seqs * model.vocab * SAMPLER_BYTES


def kv_blocks(
    model: Architecture, device: Gpu, gpus: ParallelConfig | int = 1, *, block_size: int = 16,
    utilization: float = 0.9, max_batched_tokens: int = 2048, max_seqs: int = 256,
) -> int:  # fmt: skip
    """Return the blocks of a worker: `tp` GPUs share KV heads, or repeat few; ranks have their own.

    Limits are those of each data-parallel rank.
    """
    check_bounds("utilization", utilization, gt=0, le=1)
    split = parallel_config(gpus)
    check_parallel(split, model, device)
    tp = split.tp
    weights = sum(
        size for part, size in model.parts(split).items() if part != "norms"
    )  # below 0.01%
    kv_memory = device.memory * utilization - weights
    kv_memory -= reserve(model, tp, max_batched_tokens, max_seqs)
    kv_memory -= max_seqs * model.state_bytes / tp
    block_bytes = model.token_bytes(tp) * block_size
    blocks = int(kv_memory // block_bytes)
    if blocks < 1:
        raise ConfigError(
            f"model {model.name!r} ({model.weight_bytes_on(split) / 2**30:.1f} GiB of weights a "
            f"GPU) leaves no room for KV on {split.gpus} x {device.name} "
            f"({device.memory / 2**30:.1f} GiB); raise tp, or take a larger gpu"
            + (", or more ranks with ep" if model.experts else "")
        )
    return blocks * split.dp


@dataclass(frozen=True, slots=True)
class PowerModel:
    """Watts of one GPU by utilisation."""

    max_w: float
    idle_share: float = IDLE_SHARE  # idle watts over `max_w`
    gamma: float = GAMMA  # exponent of utilisation
    full_mfu: float = FULL_MFU  # prefill MFU at which `max_w` is reached

    @property
    def idle_w(self) -> float:
        """Idle watts."""
        return self.max_w * self.idle_share

    def watts(self, use: float) -> float:
        """Return the watts at a utilisation, clipped to 0..1."""
        part: float = min(max(use, 0.0), 1.0) ** self.gamma
        return self.idle_w + (self.max_w - self.idle_w) * part

    def decode_watts(self, mbu: float) -> float:
        """Return decode watts at a memory bandwidth utilisation."""
        return self.watts(mbu)

    def prefill_watts(self, mfu: float) -> float:
        """Return prefill watts at an MFU."""
        return self.watts(mfu / self.full_mfu)
