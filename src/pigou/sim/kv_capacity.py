"""KV blocks of a worker: vLLM's arithmetic of weights, activations and what is left."""

from __future__ import annotations

from pigou.config import ConfigError
from pigou.models.architecture import Architecture
from pigou.models.quantisation import DTYPE_BYTES
from pigou.sim.gpus import Gpu

#: Bytes for each token and word while vLLM's sampler runs on its dummy batch: logits (2), in
#: float32 (4), sorted (4) with their indices (8), probabilities (4), their sums (4), mask (1),
#: scattered back (4).
SAMPLER_BYTES = 31


def layer_bytes(hidden: int, wide: float, max_batched_tokens: int) -> int:
    """Return the bytes of the widest moment of a layer on a GPU.

    It holds the residual stream and its copy, and `wide` numbers of the feed-forward layer.
    """
    return int(max_batched_tokens * (2 * hidden + wide) * DTYPE_BYTES["bfloat16"])


def reserve(model: Architecture, tp: int, max_batched_tokens: int, max_seqs: int) -> int:
    """Return the bytes of activations that a GPU keeps free for the largest step.

    That is the widest moment of a layer; the sampler's tensors are kept until it is over.
    """
    layer = layer_bytes(model.hidden, model.wide / tp, max_batched_tokens)
    return layer + max_seqs * model.vocab * SAMPLER_BYTES


def kv_blocks(
    model: Architecture,
    device: Gpu,
    tp: int = 1,
    *,
    block_size: int = 16,
    utilization: float = 0.9,
    max_batched_tokens: int = 2048,
    max_seqs: int = 256,
) -> int:
    """Return the blocks of one worker: `tp` GPUs that share weights and KV heads.

    Args:
        tp: GPUs of the worker. Where it is more than the KV heads, these are held several times.
        utilization: part of the memory that the engine may take, 0 to 1.
    """
    if not 0.0 < utilization <= 1.0:
        raise ConfigError(f"utilization is {utilization}; it must be above 0, at most 1")
    if tp < 1 or model.heads % tp:
        raise ConfigError(f"tp is {tp}; it must divide the {model.heads} heads of the model")
    device.check_tp(tp)
    weights = sum(size for part, size in model.parts(tp).items() if part != "norms")  # below 0.01%
    kv_memory = device.memory * utilization - weights
    kv_memory -= reserve(model, tp, max_batched_tokens, max_seqs)
    kv_memory -= max_seqs * model.state_bytes / tp
    block_bytes = model.token_bytes(tp) * block_size
    blocks = int(kv_memory // block_bytes)
    if blocks < 1:
        raise ConfigError(
            f"model {model.name!r} ({model.weight_bytes_on(tp) / 2**30:.1f} GiB of weights a GPU) "
            f"leaves no room for KV on {tp} x {device.name} ({device.memory / 2**30:.1f} GiB); "
            f"raise tp, or take a larger gpu"
        )
    return blocks
