"""Memory map of a GPU that serves a model: six terms, and the capacity of the KV cache.

V_usable = V_weights + V_cache + V_activations + V_adapters + V_runtime + V_scratch, per GPU
(throughput-mechanics, "VRAM Memory Pressure Map"); V_cache is what the others leave.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from pigou.config import ConfigError, check_bounds, check_fields, option
from pigou.models.architecture import Architecture
from pigou.models.gpus import GIB, SAMPLER_BYTES, Gpu, check_parallel, layer_bytes
from pigou.models.parallelism import ParallelConfig, ParallelOptions, parallel_config

#: Bytes of an activation.
_WIDTH = 2
#: Headings of options.
_ENGINE, _ADAPTERS = "Engine", "Adapters"
#: Modules of a layer that adapters may change: input and output width by the layer's own.
ADAPTER_TARGETS = ("q", "k", "v", "o", "gate", "up", "down")


class VramConfig(ParallelOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a GPU's memory is shared out."""

    tp: Annotated[int, option("GPUs that share each layer (tensor parallelism).", _ENGINE)] = 1
    utilization: Annotated[float, option("Share of GPU memory that the engine uses.", _ENGINE)] = (
        0.9
    )
    block_size: Annotated[int, option("Tokens per block.", _ENGINE)] = 16
    max_batched_tokens: Annotated[int, option("Tokens of a step at most.", _ENGINE)] = 2048
    max_seqs: Annotated[int, option("Sequences of a step at most.", _ENGINE)] = 256
    runtime_gib: Annotated[
        float,
        option("CUDA context, NCCL buffers and CUDA graphs, in GiB: an assumption.", _ENGINE),
    ] = 1.0
    adapters: Annotated[int, option("LoRA adapters held at once.", _ADAPTERS)] = 0
    adapter_rank: Annotated[
        int, option("Rank of the largest adapter, for which all are allocated.", _ADAPTERS)
    ] = 16
    adapter_targets: Annotated[
        tuple[str, ...],
        option("Module that adapters change: q, k, v, o, gate, up or down. Repeatable.", _ADAPTERS),
    ] = ("q", "k", "v", "o")

    def __post_init__(self) -> None:
        ParallelOptions.__post_init__(self)
        check_fields(
            self, "tp", "block_size", "max_batched_tokens", "max_seqs", "adapter_rank", ge=1,
        )  # fmt: skip
        check_bounds("utilization", self.utilization, gt=0, le=1)
        check_bounds("adapters", self.adapters, ge=0)
        check_bounds("runtime_gib", self.runtime_gib, ge=0)
        for target in self.adapter_targets:
            if target not in ADAPTER_TARGETS:
                known = ", ".join(ADAPTER_TARGETS)
                raise ConfigError(f"adapter_targets has {target!r}; each must be one of {known}")

    @property
    def parallel(self) -> ParallelConfig:
        """How the GPUs of a worker share the model."""
        return ParallelConfig(self.tp, self.dp, self.ep, self.redundant_experts)


class VramMap(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one GPU, in bytes."""

    usable: int  # share of its memory that the engine takes
    weights: int
    cache: int  # remaining memory for whole KV blocks
    activations: int
    adapters: int  # LoRA weights
    runtime: int  # context, communication, graphs
    scratch: int  # the sampler's tensors over the vocabulary
    blocks: int  # blocks of all data-parallel ranks
    tokens: int  # tokens that the blocks hold, where every layer holds all


def vram_map(
    model: Architecture, device: Gpu, config: VramConfig, draft: Architecture | None = None
) -> VramMap:
    """Return the memory map of one GPU of a worker; a draft model is whole on it, with its KV."""
    device.check_tp(config.tp)
    if config.dp > 1 or config.ep or config.redundant_experts:
        check_parallel(config.parallel, model, device)
    for cache, _ in model.caches:
        if cache.heads % config.tp and config.tp % cache.heads:
            raise ConfigError(
                f"tp is {config.tp}, and {model.name} has {cache.heads} KV heads; give a divisor "
                "or a multiple of them"
            )
    usable = int(device.memory * config.utilization)
    tp = config.tp
    weights = model.weight_bytes_on(config.parallel)
    block = model.token_bytes(tp) * config.block_size
    if draft is not None:
        weights += draft.weight_bytes_on(ParallelConfig())
        block += draft.token_bytes() * config.block_size
    activations = layer_bytes(model.hidden, model.wide / tp, config.max_batched_tokens)
    scratch = config.max_seqs * model.vocab * SAMPLER_BYTES
    adapters = 0
    if config.adapters:
        adapter = adapter_bytes(model, config.adapter_rank, config.adapter_targets)
        adapters = config.adapters * adapter // tp
    runtime = int(config.runtime_gib * GIB)
    room = usable - weights - activations - adapters - runtime - scratch
    blocks = room // block
    if blocks < 1:
        raise ConfigError(
            f"{model.name}: weights, activations, adapters and the rest need "
            f"{(usable - room) / GIB:.1f} GiB of the {usable / GIB:.1f} GiB that the engine takes "
            f"on {device.name}, and leave no room for KV; raise tp, or take a larger gpu"
        )
    return VramMap(
        usable=usable, weights=weights, cache=blocks * block, activations=activations,
        adapters=adapters, runtime=runtime, scratch=scratch, blocks=blocks * config.dp,
        tokens=blocks * config.dp * config.block_size,
    )  # fmt: skip


def adapter_bytes(model: Architecture, rank: int, targets: Sequence[str]) -> int:
    """Return bytes of one undivided LoRA adapter: r (in + out) b a target (Hu et al. 2021)."""
    kinds = {(cache.heads, cache.width, cache.latent) for cache, _ in model.caches}
    if len(kinds) != 1 or any(cache.latent for cache, _ in model.caches):
        raise ConfigError(f"{model.name}: adapters of its attention are not described")
    ((heads, width, _),) = kinds
    hidden, queries, keys = model.hidden, model.heads * width // 2, heads * width // 2
    ffn = model.gated_width
    if not ffn and set(targets) & {"gate", "up", "down"}:
        raise ConfigError(
            f"adapter_targets has {', '.join(targets)}; {model.name} has experts, or no gate, "
            "whose adapters are not described: leave gate, up and down out"
        )
    sums = {
        "q": hidden + queries, "k": hidden + keys, "v": hidden + keys, "o": queries + hidden,
        "gate": hidden + ffn, "up": hidden + ffn, "down": ffn + hidden,
    }  # fmt: skip
    return rank * sum(sums[target] for target in targets) * _WIDTH * model.layers


class MixDemand(msgspec.Struct, frozen=True, kw_only=True):
    """Cache that a mix of sequences needs on each GPU, and the cache available."""

    demand: int  # bytes of the sequences at their full lengths
    safe: int  # bytes of the cache less the margin
    fits: bool  # whether the demand is within the cache
    is_safe: bool  # whether it is within `safe`
    # seconds of a decode step of them all, which reads weights and cache once, at the shares of the
    # peak that the GPU reaches.
    step_s: float
    step_peak_s: float


def mix_demand(
    model: Architecture, device: Gpu, memory: VramMap, sequences: Sequence[tuple[int, int]],
    gpus: ParallelConfig | int = 1, margin: float = 0.3, draft: Architecture | None = None,
) -> MixDemand:  # fmt: skip
    """Return what sequences need of a worker's cache, less a share `margin`, and their step's time.

    t = (W + sum of KV) / bandwidth: a decode step reads the weights and each sequence's cache once.
    Weights of experts are counted whole: a large batch reads nearly all.
    """
    check_bounds("margin", margin, ge=0, lt=1)
    split = parallel_config(gpus)  # sequences are spread evenly over its ranks
    demand = sum(count * model.sequence_bytes(tokens, split.tp) for count, tokens in sequences)
    if draft is not None:
        demand += sum(count * draft.sequence_bytes(tokens) for count, tokens in sequences)
    demand = -(-demand // split.dp)
    safe = int(memory.cache * (1.0 - margin))
    reads_s = (memory.weights / device.streaming + demand / device.cache) / device.bandwidth
    return MixDemand(
        demand=demand, safe=safe, fits=demand <= memory.cache, is_safe=demand <= safe,
        step_s=reads_s, step_peak_s=(memory.weights + demand) / device.bandwidth,
    )  # fmt: skip


def ridge_point(device: Gpu, dtype: str) -> float:
    """Return the FLOPs a byte at which memory and compute take as long (Williams et al. 2009)."""
    return device.peak(dtype) / device.bandwidth


def decode_intensity(model: Architecture, sequences: int, tokens: int) -> float:
    """Return the FLOPs a byte of a decode step."""
    flops = 2.0 * sequences * model.active_parameters
    return flops / (model.weight_bytes + sequences * model.sequence_bytes(tokens))


def measured_map(about: Mapping[str, Any]) -> VramMap:
    """Return the six terms of a worker's device (CUDA graphs in runtime); `usable` is their sum."""
    memory = about.get("memory")
    if not isinstance(memory, Mapping):
        raise ConfigError(
            "the worker tells of no memory: it is no worker of Pigou's that computes (--executor "
            "torch), or an older one"
        )
    names = ("weights", "cache", "activations", "adapters", "runtime", "graphs", "scratch")
    values = {name: memory.get(name) for name in names} | {
        name: about.get(name) for name in ("blocks", "block_size")
    }
    sizes: dict[str, int] = {}
    for name, value in values.items():
        if not isinstance(value, int) or value < 0:
            raise ConfigError(f"the worker says {name} is {value!r}; it must be a count")
        sizes[name] = value
    return VramMap(
        usable=sum(sizes[name] for name in names),
        weights=sizes["weights"], cache=sizes["cache"], activations=sizes["activations"],
        adapters=sizes["adapters"], runtime=sizes["runtime"] + sizes["graphs"],
        scratch=sizes["scratch"], blocks=sizes["blocks"],
        tokens=sizes["blocks"] * sizes["block_size"],
    )  # fmt: skip
