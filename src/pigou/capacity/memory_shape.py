"""The memory that a model's tensors take: weights and KV cache, by part and by layer kind.

Shapes cover grouped-query, multi-head and latent attention, sliding windows, experts and shared
experts. The timing models of `pigou.sim` describe fewer architectures: they need FLOPs too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from pigou.config import ConfigError
from pigou.sim.architecture import DTYPE_BYTES, QUANTISED, Architecture

#: Bytes of a token in a layer of DeepSeek's latent cache as vLLM packs it: 512 FP8 numbers, four
#: float32 scales, 64 rotary numbers in bfloat16.
FP8_DS_MLA_BYTES = 656
#: Number formats of the KV cache.
KV_DTYPES = ("bfloat16", "float16", "float32", "fp8", "int8", "fp8_ds_mla")


@dataclass(frozen=True, slots=True)
class WeightPart:
    """Weights of one kind, over all layers.

    Attributes:
        name: like `attention`, `experts`, `norms`.
        parameters: their number.
        dtype: one of `DTYPE_BYTES`.
        shards: GPUs at most that tensor parallelism splits it over; 0 for any number, 1 for a
            part that each GPU has whole.
    """

    name: str
    parameters: int
    dtype: str
    shards: int = 0

    def bytes_per_gpu(self, tp: int) -> float:
        """Return the bytes on each of `tp` GPUs."""
        return self.parameters * DTYPE_BYTES[self.dtype] / (min(tp, self.shards) or tp)


@dataclass(frozen=True, slots=True)
class KvLayers:
    """Layers whose KV cache is alike.

    Attributes:
        layers: their number.
        heads: KV heads; 1 for a latent cache, which tensor parallelism does not divide.
        width: numbers that a token leaves for each head: keys and values, or the latent.
        window: tokens that a layer looks back on at most; 0 for all.
        latent: whether it is multi-head latent attention.
    """

    layers: int
    heads: int
    width: int
    window: int = 0
    latent: bool = False

    def token_bytes(self, dtype: str) -> float:
        """Return the bytes of a token over these layers, undivided."""
        if dtype == "fp8_ds_mla":
            return float(self.layers * FP8_DS_MLA_BYTES)
        return self.layers * self.heads * self.width * DTYPE_BYTES[dtype]

    def held_tokens(self, tokens: int) -> int:
        """Return the tokens that are held of a sequence of `tokens`."""
        return min(tokens, self.window) if self.window else tokens


@dataclass(frozen=True, slots=True)
class MemoryShape:
    """What a model needs memory for.

    Attributes:
        name: of the model.
        weights: by part.
        kv: layers by kind of cache.
        kv_dtype: number format of the cache, one of `KV_DTYPES`.
        hidden: width of the residual stream.
        wide: numbers of the widest feed-forward moment of one token, over all GPUs.
        vocab: rows of the embedding.
        ffn: width of the gated feed-forward layers; 0 where they have experts, or no gate.
        query_width: query heads times their width; 0 where it is not known.
        active_parameters: that compute one token.
        context: tokens of a sequence at most.
    """

    name: str
    weights: tuple[WeightPart, ...]
    kv: tuple[KvLayers, ...]
    kv_dtype: str
    hidden: int
    wide: int
    vocab: int
    ffn: int
    query_width: int
    active_parameters: int
    context: int

    def __post_init__(self) -> None:
        """Refuse a number format that the cache cannot have."""
        if self.kv_dtype not in KV_DTYPES:
            raise ConfigError(
                f"kv_dtype is {self.kv_dtype!r}; it must be one of {', '.join(KV_DTYPES)}"
            )
        if self.kv_dtype == "fp8_ds_mla" and not all(
            kind.latent and kind.width == 576 for kind in self.kv
        ):
            raise ConfigError(
                f"kv_dtype is 'fp8_ds_mla'; {self.name} has no latent cache of 576 numbers: give "
                "fp8 or bfloat16"
            )

    @property
    def parameters(self) -> int:
        """All parameters."""
        return sum(part.parameters for part in self.weights)

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return sum(kind.layers for kind in self.kv)

    def weight_bytes(self, tp: int = 1) -> int:
        """Return the bytes of the weights on each of `tp` GPUs."""
        return round(sum(part.bytes_per_gpu(tp) for part in self.weights))

    def token_bytes(self, tp: int = 1) -> int:
        """Return the bytes of one more token on each GPU, in a sequence below every window.

        2 L H_kv d b / min(TP, H_kv) for grouped-query attention; L (r_kv + d_rope) b, undivided,
        for latent attention.
        """
        return round(sum(kind.token_bytes(self.kv_dtype) / min(tp, kind.heads) for kind in self.kv))

    def sequence_bytes(self, tokens: int, tp: int = 1) -> int:
        """Return the bytes of the cache of a sequence of `tokens` on each GPU."""
        return round(
            sum(
                kind.token_bytes(self.kv_dtype) / min(tp, kind.heads) * kind.held_tokens(tokens)
                for kind in self.kv
            )
        )

    def with_kv_dtype(self, dtype: str) -> Self:
        """Return the same model with another number format of its cache.

        Raises:
            ConfigError: the cache cannot have it.
        """
        return replace(self, kv_dtype=dtype)

    def as_multi_head(self) -> Self:
        """Return the model with a KV head for each query head, for comparison.

        Raises:
            ConfigError: its cache is latent, or its query heads are not known.
        """
        if not self.query_width or any(kind.latent for kind in self.kv):
            raise ConfigError(f"{self.name}: its attention has no form with a KV head a query head")
        kinds = tuple(
            replace(kind, heads=self.query_width // (kind.width // 2)) for kind in self.kv
        )
        return replace(self, kv=kinds)


def shape_of(model: Architecture) -> MemoryShape:
    """Return the memory shape of an architecture that the simulator can time."""
    head = model.head_dtype
    kv_width = 2 * model.kv_heads * model.head_dim
    queries = model.heads * model.head_dim
    experts = max(model.experts, 1)
    parts = {
        "queries and output": (2 * model.hidden * queries, model.dtype, 0),
        "keys and values": (model.hidden * kv_width, model.dtype, model.kv_heads),
        "experts" if model.experts else "feed-forward": (
            model.ffn_parameters * experts, model.dtype, 0,
        ),
        "router": (model.router_parameters, "bfloat16", 1),
        "norms": (2 * model.hidden + (2 * model.head_dim if model.qk_norm else 0), "bfloat16", 1),
    }  # fmt: skip
    weights = [
        WeightPart(name, parameters * model.layers, dtype, shards)
        for name, (parameters, dtype, shards) in parts.items()
        if parameters
    ]
    weights += embeddings(model.vocab, model.hidden, head, tied=model.tied)
    return MemoryShape(
        name=model.name,
        weights=tuple(weights),
        kv=(KvLayers(model.layers, model.kv_heads, 2 * model.head_dim),),
        kv_dtype=model.kv_dtype,
        hidden=model.hidden,
        wide=model.widest,
        vocab=model.vocab,
        ffn=model.ffn if model.gated and not model.experts else 0,
        query_width=queries,
        active_parameters=model.active_parameters,
        context=model.context,
    )


def embeddings(vocab: int, hidden: int, dtype: str, *, tied: bool) -> list[WeightPart]:
    """Return embedding and output layer, which quantisation leaves at 16 bits, and the last norm.

    Args:
        vocab: rows.
        hidden: columns.
        dtype: of the layers' weights.
        tied: whether the output layer is the embedding.
    """
    dtype = "bfloat16" if dtype in QUANTISED else dtype
    parts = [WeightPart("embedding", vocab * hidden, dtype)]
    if not tied:
        parts.append(WeightPart("output layer", vocab * hidden, dtype))
    return [*parts, WeightPart("last norm", hidden, "bfloat16", 1)]
