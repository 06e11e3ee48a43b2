"""Architecture: a model's matrices, KV cache, parameters, bytes and FLOPs.

Used by the simulator's timing, the capacity planner, and workers' own estimates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pigou.config import ConfigError
from pigou.models.parallelism import ParallelConfig, parallel_config
from pigou.models.quantisation import DTYPE_BYTES, Format

#: Bytes per token and layer of DeepSeek's latent cache as vLLM packs it: 512 FP8 numbers, four
#: float32 scales, 64 rotary numbers in bfloat16.
FP8_DS_MLA_BYTES = 656
#: Number formats of the KV cache.
KV_DTYPES = ("bfloat16", "float16", "float32", "fp8", "int8", "fp8_ds_mla", "nvfp4")


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix of a layer, or `copies` alike, one per expert."""

    part: str  # attention, feed-forward, experts, shared experts, router
    inner: int
    outer: int
    format: Format
    copies: int = 1
    active: int = 1  # copies used per token
    shards: int = 0  # max GPUs that split it: 0 for any number, 1 if replicated
    rows: bool = False  # tensor parallelism splits `inner` instead of `outer`
    fused: bool = False  # computed in one product with the previous matrix

    @property
    def parameters(self) -> int:
        """Parameters of all copies."""
        return self.inner * self.outer * self.copies

    @property
    def size(self) -> float:
        """Bytes of all copies, scales included."""
        return self.parameters * self.format.size

    def share(self, gpus: ParallelConfig | int) -> float:
        """Return the fraction that each GPU holds."""
        split = parallel_config(gpus)
        if self.copies > 1 and (split.ep or split.dp > 1):
            return split.expert_share(self.copies)
        return 1.0 / (min(split.tp, self.shards) or split.tp)


@dataclass(frozen=True, slots=True)
class Cache:
    """Cache entries of one layer: keys and values, a latent, or index keys."""

    heads: int  # split by tensor parallelism; 1 for an undivided latent cache
    width: int  # numbers per head
    prompt_flops: float  # per pair of tokens in prefill, over all query heads
    decode_flops: float
    window: int = 0  # max tokens kept and read; 0 for all
    selected: int = 0  # max tokens read, of those kept; 0 for all
    stride: int = 1  # tokens per entry
    latent: bool = False
    dtype: str = ""  # number format, if not the model's

    def token_bytes(self, dtype: str) -> float:
        """Return the bytes per token and layer, without tensor parallelism."""
        if dtype == "fp8_ds_mla" and not self.dtype:
            return float(FP8_DS_MLA_BYTES)
        return self.heads * self.width * DTYPE_BYTES[self.dtype or dtype] / self.stride

    def held(self, tokens: int) -> int:
        """Return the tokens kept of a sequence of `tokens`."""
        return min(tokens, self.window) if self.window else tokens


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Identical layers."""

    count: int
    matrices: tuple[Matrix, ...]
    vectors: int = 0  # parameters of norms, biases, sinks and convolutions, on every GPU
    caches: tuple[Cache, ...] = ()
    state: int = 0  # bytes per sequence at any length: linear attention, state space
    token_flops: float = 0.0  # per token, besides matrix products
    sums: int = 2  # all-reduces under tensor parallelism
    wide: int = 0  # feed-forward activations per token
    qkv_width: int = 0  # output width of the QKV projection


@dataclass(frozen=True, slots=True)
class Extra:
    """Weights outside the decoder."""

    name: str
    parameters: int
    size: int  # bytes
    loaded: bool = True  # loaded to serve text


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model as engines serve it."""

    name: str
    hidden: int
    vocab: int
    heads: int  # most query heads of any layer
    kinds: tuple[LayerKind, ...]
    embedding: Format
    head: Format
    main: Format  # format of most matrices
    tied: bool = False
    extras: tuple[Extra, ...] = ()
    kv_dtype: str = "bfloat16"
    context: int = 131_072

    def __post_init__(self) -> None:
        if self.kv_dtype not in KV_DTYPES:
            raise ConfigError(
                f"kv_dtype is {self.kv_dtype!r}; it must be one of {', '.join(KV_DTYPES)}"
            )
        if self.kv_dtype == "fp8_ds_mla" and not all(
            cache.dtype or (cache.latent and cache.width == 576) for cache, _ in self.caches
        ):
            raise ConfigError(
                f"kv_dtype is 'fp8_ds_mla'; {self.name} has no latent cache of 576 numbers: give "
                "fp8 or bfloat16"
            )

    # --- layers -------------------------------------------------------------------------------

    @property
    def layers(self) -> int:
        """Decoder layers; blocks in hybrid models."""
        return sum(kind.count for kind in self.kinds)

    @property
    def caches(self) -> tuple[tuple[Cache, int], ...]:
        """Kinds of KV cache, and the number of layers with each."""
        counts: dict[Cache, int] = {}
        for kind in self.kinds:
            for cache in kind.caches:
                counts[cache] = counts.get(cache, 0) + kind.count
        return tuple(counts.items())

    @property
    def kv_heads(self) -> int:
        """Fewest KV heads of any layer."""
        return min((cache.heads for cache, _ in self.caches if not cache.dtype), default=1)

    @property
    def experts(self) -> int:
        """Routed experts per layer; 0 for a dense model."""
        return max(
            (matrix.copies for _, matrix in self._matrices() if matrix.copies > 1), default=0
        )

    @property
    def active(self) -> int:
        """Experts per token."""
        return max(
            (matrix.active for _, matrix in self._matrices() if matrix.copies > 1), default=0
        )

    @property
    def gated_width(self) -> int:
        """Feed-forward width if all layers share the same gated one, else 0."""
        widths = {
            tuple(m.outer for m in kind.matrices if m.part == "feed-forward" and not m.rows)
            for kind in self.kinds
        }
        sole = next(iter(widths))
        return sole[0] if len(widths) == 1 and len(sole) == 2 else 0

    @property
    def wide(self) -> int:
        """Max feed-forward activations per token."""
        return max(kind.wide for kind in self.kinds)

    def _matrices(self) -> Iterator[tuple[int, Matrix]]:
        return ((kind.count, matrix) for kind in self.kinds for matrix in kind.matrices)

    # --- parameters and bytes -----------------------------------------------------------------

    @property
    def parameters(self) -> int:
        """Parameters that an engine loads."""
        layers = sum(count * matrix.parameters for count, matrix in self._matrices())
        layers += sum(kind.count * kind.vectors for kind in self.kinds)
        words = self.vocab * self.hidden * (1 if self.tied else 2) + self.hidden
        return layers + words + sum(extra.parameters for extra in self.extras if extra.loaded)

    @property
    def active_parameters(self) -> int:
        """Parameters multiplied per token; the embedding counts only as output layer."""
        layers = sum(count * m.inner * m.outer * m.active for count, m in self._matrices())
        return layers + self.vocab * self.hidden

    def parts(self, gpus: ParallelConfig | int = 1) -> dict[str, float]:
        """Return the weight bytes on each GPU, by part."""
        tp = parallel_config(gpus).tp
        sizes: dict[str, float] = {}

        def add(name: str, size: float) -> None:
            sizes[name] = sizes.get(name, 0.0) + size

        for count, matrix in self._matrices():
            add(matrix.part, count * matrix.size * matrix.share(gpus))
        add("norms", 2.0 * (self.hidden + sum(kind.count * kind.vectors for kind in self.kinds)))
        add("embedding", self.vocab * self.hidden * self.embedding.size / tp)
        if not self.tied:
            add("output layer", self.vocab * self.hidden * self.head.size / tp)
        for extra in self.extras:
            if extra.loaded:
                add(extra.name, extra.size)
        return sizes

    def weight_bytes_on(self, gpus: ParallelConfig | int) -> int:
        """Return the weight bytes on each GPU."""
        return round(sum(self.parts(gpus).values()))

    @property
    def weight_bytes(self) -> int:
        """Weight bytes that an engine loads."""
        return self.weight_bytes_on(1)

    @property
    def checkpoint_bytes(self) -> int:
        """Checkpoint bytes, multi-token prediction included."""
        return self.weight_bytes + sum(extra.size for extra in self.extras if not extra.loaded)

    @property
    def compute_dtype(self) -> str:
        """Number format of most products, on a GPU that supports it."""
        return self.main.compute

    # --- KV cache -----------------------------------------------------------------------------

    @property
    def kv_bytes(self) -> int:
        """KV cache bytes per token, over all layers."""
        return self.token_bytes(1)

    def token_bytes(self, tp: int = 1) -> int:
        """Return the bytes of one more token on each GPU, in a sequence within every window.

        2 L H_kv d b / min(TP, H_kv) for grouped-query attention; L (r_kv + d_rope) b, undivided,
        for latent attention.
        """
        return round(
            sum(
                count * cache.token_bytes(self.kv_dtype) / min(tp, cache.heads)
                for cache, count in self.caches
            )
        )

    def sequence_bytes(self, tokens: int, tp: int = 1) -> int:
        """Return the cache and state bytes of a sequence of `tokens`, per GPU."""
        held = sum(
            count * cache.token_bytes(self.kv_dtype) / min(tp, cache.heads) * cache.held(tokens)
            for cache, count in self.caches
        )
        return round(held + self.state_bytes / tp)

    @property
    def state_bytes(self) -> int:
        """State bytes per sequence, at any length (linear attention, state space layers)."""
        return sum(kind.count * kind.state for kind in self.kinds)

    def multi_head_token_bytes(self) -> int | None:
        """Return the bytes per token if each query head had a KV head; None if undefined."""
        if any(cache.latent or cache.dtype for cache, _ in self.caches):
            return None
        width = sum(count * self.heads * cache.width for cache, count in self.caches)
        return round(width * DTYPE_BYTES[self.kv_dtype])

    # --- FLOPs --------------------------------------------------------------------------------

    def flops(self, tokens: int, kv: int = 0, sampled: int = 1) -> float:
        """Return the FLOPs of a chunk of `tokens` after `kv` cached ones, 2 per multiply-add.

        Attention is causal: token i reads kv + i + 1 entries at 4 * heads * head_dim FLOPs per
        layer.
        """
        head = self.vocab * self.hidden
        dense = 2.0 * (self.active_parameters - head) * tokens + 2.0 * head * sampled
        return dense + self.pair_flops * (tokens * kv + tokens * (tokens + 1) / 2)

    @property
    def pair_flops(self) -> float:
        """Attention FLOPs per pair of tokens, over all layers."""
        return sum(count * cache.prompt_flops for cache, count in self.caches)

    def expected_experts(self, tokens: float) -> float:
        """Expected distinct experts of `tokens` uniform choices: E (1 - (1 - k/E)^tokens)."""
        if not self.experts:
            return 1.0
        return float(self.experts * (1.0 - (1.0 - self.active / self.experts) ** tokens))

    @property
    def expert_bytes(self) -> float:
        """Bytes of one expert in every layer."""
        return sum(count * m.size / m.copies for count, m in self._matrices() if m.copies > 1)
