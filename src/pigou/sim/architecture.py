"""Architectures: the shapes of models, and what they cost in parameters, FLOPs and bytes.

Every preset is what the model's own `config.json` says (for Nemotron-4-340B: table 1 of its
technical report, arXiv 2406.11704), so that a preset and a file give the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pigou.config import ConfigError
from pigou.sim.gpus import Gpu

#: Bytes of one number, the scales of 4-bit floats included: NVFP4 has one of 8 bits for 16
#: numbers, MXFP4 for 32.
DTYPE_BYTES = {
    "float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5,
    "nvfp4": 0.5625, "mxfp4": 0.53125,
}  # fmt: skip
#: Formats that quantise the decoder layers alone: embedding and output layer stay at 16 bits.
QUANTISED = ("fp8", "int8", "int4", "nvfp4", "mxfp4")


@dataclass(frozen=True, slots=True)
class Architecture:
    """A decoder-only transformer with grouped attention.

    Attributes:
        name: of the model.
        layers: decoder layers.
        hidden: width of the residual stream.
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: width of a head.
        ffn: width of the feed-forward layer, or of one expert.
        vocab: rows of the embedding.
        tied: whether the output layer is the embedding.
        gated: whether the feed-forward layer has a gate (three matrices, not two).
        qk_norm: whether queries and keys are normalised.
        experts: feed-forward layers to choose from; 0 for a dense model.
        active: of those, how many compute a token.
        dtype: of the decoder layers' weights, one of `DTYPE_BYTES`.
        compute: number format that their products are computed in; empty: that of `dtype`.
        kv_dtype: of the KV cache.
        context: most tokens of a sequence.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool = False
    gated: bool = True
    qk_norm: bool = False
    experts: int = 0
    active: int = 0
    dtype: str = "bfloat16"
    compute: str = ""
    kv_dtype: str = "bfloat16"
    context: int = 131_072

    def __post_init__(self) -> None:
        """Refuse shapes that no model has."""
        for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.heads % self.kv_heads:
            raise ConfigError(f"kv_heads is {self.kv_heads}; it must divide heads, {self.heads}")
        if not 0 <= self.active <= self.experts or bool(self.active) != bool(self.experts):
            raise ConfigError(f"active is {self.active}; it must be 1 to experts, {self.experts}")
        for name in ("dtype", "kv_dtype"):
            if getattr(self, name) not in DTYPE_BYTES:
                known = ", ".join(DTYPE_BYTES)
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be one of {known}")

    # --- parameters ---------------------------------------------------------------------------

    @property
    def qkv_width(self) -> int:
        """Numbers that the projection of queries, keys and values yields for a token."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def attention_parameters(self) -> int:
        """Parameters of one layer's projections: queries, keys, values, output."""
        return self.hidden * (self.qkv_width + self.heads * self.head_dim)

    @property
    def ffn_parameters(self) -> int:
        """Parameters of one feed-forward layer, or of one expert."""
        return (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def widest(self) -> int:
        """Numbers of a token that a feed-forward layer holds at once: projections and product."""
        return (3 if self.gated else 2) * self.ffn * max(self.active, 1)

    @property
    def router_parameters(self) -> int:
        """Parameters of one layer's choice of experts."""
        return self.hidden * self.experts

    @property
    def parameters(self) -> int:
        """All parameters, without those of norms (below 0.01%)."""
        layer_parameters = self.attention_parameters + self.router_parameters
        layer_parameters += self.ffn_parameters * max(self.experts, 1)
        return self.layers * layer_parameters + self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def active_parameters(self) -> int:
        """Parameters that one token is multiplied with, the output layer included.

        The embedding is a look-up, and counts only as the output layer.
        """
        layer_parameters = self.attention_parameters + self.router_parameters
        layer_parameters += self.ffn_parameters * max(self.active, 1)
        return self.layers * layer_parameters + self.vocab * self.hidden

    # --- bytes and FLOPs ----------------------------------------------------------------------

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        words = self.vocab * self.hidden * (1 if self.tied else 2)
        layers = (self.parameters - words) * DTYPE_BYTES[self.dtype]
        return int(layers + words * DTYPE_BYTES[self.head_dtype])

    @property
    def head_dtype(self) -> str:
        """Number format of the embedding and of the output layer."""
        return "bfloat16" if self.dtype in QUANTISED else self.dtype

    @property
    def compute_dtype(self) -> str:
        """Number format in which a GPU that has it computes the layers' products."""
        four = {"nvfp4": "fp4", "mxfp4": "fp4", "int4": "bfloat16"}
        return self.compute or four.get(self.dtype, self.dtype)

    @property
    def kv_bytes(self) -> int:
        """Bytes in the KV cache of one token, over all layers."""
        entries = 2 * self.layers * self.kv_heads * self.head_dim
        return int(entries * DTYPE_BYTES[self.kv_dtype])

    def flops(self, tokens: int, kv: int = 0, sampled: int = 1) -> float:
        """FLOPs of a prompt chunk of `tokens` after `kv` cached ones: 2 for each multiplication.

        Attention is counted causally: token i reads kv + i + 1 entries, and each costs
        4 * heads * head_dim a layer (scores, and the sum of values).
        """
        head = self.vocab * self.hidden
        dense = 2.0 * (self.active_parameters - head) * tokens + 2.0 * head * sampled
        reads = tokens * kv + tokens * (tokens + 1) / 2
        return dense + 4.0 * self.layers * self.heads * self.head_dim * reads

    def expected_experts(self, tokens: float) -> float:
        """Experts of a layer that at least one of `tokens` tokens chooses, choices uniform.

        E (1 - (1 - k/E)^tokens), the expected number of occupied bins.
        """
        if not self.experts:
            return 1.0
        return float(self.experts * (1.0 - (1.0 - self.active / self.experts) ** tokens))

    def cast(self, dtype: str, compute: str = "") -> Architecture:
        """Return the same shapes with other weights (`dtype`, `compute`)."""
        return replace(self, dtype=dtype, compute=compute)


PRESETS = {
    "llama-3.1-8b": Architecture(
        "meta-llama/Llama-3.1-8B", 32, 4096, 32, 8, 128, 14_336, 128_256
    ),
    "llama-3.1-70b": Architecture(
        "meta-llama/Llama-3.1-70B", 80, 8192, 64, 8, 128, 28_672, 128_256
    ),
    "nemotron-4-340b": Architecture(
        "nvidia/Nemotron-4-340B-Instruct", 96, 18_432, 96, 8, 192, 73_728, 256_000,
        gated=False, context=4096,
    ),
    "qwen3-32b": Architecture(
        "Qwen/Qwen3-32B", 64, 5120, 64, 8, 128, 25_600, 151_936, qk_norm=True, context=40_960
    ),
    "qwen3-30b-a3b": Architecture(
        "Qwen/Qwen3-30B-A3B-Instruct-2507", 48, 2048, 32, 4, 128, 768, 151_936,
        qk_norm=True, experts=128, active=8, context=262_144,
    ),
}  # fmt: skip


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
    layer = layer_bytes(model.hidden, model.widest / tp, max_batched_tokens)
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
        model: its architecture.
        device: each of its GPUs.
        tp: GPUs of the worker. Where it is more than the KV heads, these are held several times.
        block_size: tokens in a block.
        utilization: part of the memory that the engine may take, 0 to 1.
        max_batched_tokens: most tokens of a step.
        max_seqs: most sequences of a step.

    Raises:
        ConfigError: a value makes no sense, or the weights leave no room for a block.
    """
    if not 0.0 < utilization <= 1.0:
        raise ConfigError(f"utilization is {utilization}; it must be above 0, at most 1")
    if tp < 1 or model.heads % tp:
        raise ConfigError(f"tp is {tp}; it must divide the {model.heads} heads of the model")
    device.check_tp(tp)
    kv_memory = device.memory * utilization - model.weight_bytes / tp
    kv_memory -= reserve(model, tp, max_batched_tokens, max_seqs)
    block_bytes = model.kv_bytes / min(tp, model.kv_heads) * block_size
    blocks = int(kv_memory // block_bytes)
    if blocks < 1:
        raise ConfigError(
            f"model {model.name!r} ({model.weight_bytes / tp / 2**30:.1f} GiB of weights a GPU) "
            f"leaves no room for KV on {tp} x {device.name} ({device.memory / 2**30:.1f} GiB); "
            f"raise tp, or take a larger gpu"
        )
    return blocks
