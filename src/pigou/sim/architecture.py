"""Architectures: the shapes of models, and what they cost in parameters, FLOPs and bytes.

Every preset is what the model's own `config.json` says (for Nemotron-4-340B: table 1 of its
technical report, arXiv 2406.11704), so that a preset and a file give the same numbers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pigou.config import ConfigError

#: Bytes of one number.
DTYPE_BYTES = {
    "float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5,
}  # fmt: skip
#: Activations whose layer has no gate: two matrices instead of three.
_UNGATED = {"relu2", "relu", "gelu", "gelu_new"}
#: Keys that mean a layer which these formulas do not describe.
_FOREIGN = {
    "kv_lora_rank": "multi-head latent attention",
    "n_shared_experts": "shared experts",
    "shared_expert_intermediate_size": "shared experts",
    "linear_num_value_heads": "linear attention",
    "mamba_d_state": "state space layers",
}


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
        dtype: of weights and activations, one of `DTYPE_BYTES`.
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
    def router_parameters(self) -> int:
        """Parameters of one layer's choice of experts."""
        return self.hidden * self.experts

    @property
    def parameters(self) -> int:
        """All parameters, without those of norms (below 0.01%)."""
        each = self.attention_parameters + self.router_parameters
        each += self.ffn_parameters * max(self.experts, 1)
        return self.layers * each + self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def active_parameters(self) -> int:
        """Parameters that one token is multiplied with, the output layer included.

        The embedding is a look-up, and counts only as the output layer.
        """
        each = self.attention_parameters + self.router_parameters
        each += self.ffn_parameters * max(self.active, 1)
        return self.layers * each + self.vocab * self.hidden

    # --- bytes and FLOPs ----------------------------------------------------------------------

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return int(self.parameters * DTYPE_BYTES[self.dtype])

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

    def cast(self, dtype: str, kv_dtype: str | None = None) -> Architecture:
        """Return the same shapes with other number formats."""
        return replace(self, dtype=dtype, kv_dtype=kv_dtype or self.kv_dtype)


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


def plain(name: str) -> str:
    """Return a model's name as it is compared: no owner, lower case, letters and digits only."""
    return "".join(c for c in name.rsplit("/", 1)[-1].lower() if c.isalnum())


def architecture(model: str) -> Architecture:
    """Find the architecture of a preset's name, a Hugging Face id of one, or a `config.json`.

    Args:
        model: "llama-3.1-8b", "Qwen/Qwen3-32B", a folder with a `config.json`, or its path.
            A preset's suffix may be left out or added ("-Instruct").

    Raises:
        ConfigError: nothing is known by that name, or the file describes another kind of model.
    """
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return read_architecture(path)
    wanted = plain(model)
    for key, preset in PRESETS.items():
        if wanted and wanted.startswith(plain(key)):
            return preset
    known = ", ".join(PRESETS)
    raise ConfigError(f"model is {model!r}; it must be one of {known}, or a path to a config.json")


def read_architecture(path: Path) -> Architecture:
    """Read a Hugging Face `config.json`.

    Raises:
        ConfigError: a key is missing, or asks for layers that the formulas do not describe.
    """
    source = _source(path)
    for key, meaning in _FOREIGN.items():
        if source.get(key):
            raise ConfigError(f"{path}: {key} is {source[key]!r}: {meaning} cannot be timed")
    if source.get("mlp_only_layers") or source.get("decoder_sparse_step", 1) != 1:
        raise ConfigError(f"{path}: only some layers have experts: that cannot be timed")
    if "sliding_attention" in (source.get("layer_types") or ()):
        raise ConfigError(f"{path}: layer_types has sliding_attention: that cannot be timed")
    heads = _number(path, source, "num_attention_heads")
    hidden = _number(path, source, "hidden_size")
    experts = _number(path, source, "num_experts", 0)
    experts = experts or _number(path, source, "num_local_experts", 0)
    sparse = bool(source.get("moe_intermediate_size")) and experts > 0
    dtype = _dtype(path, source)
    return Architecture(
        name=str(source.get("_name_or_path") or path.resolve().parent.name),
        layers=_number(path, source, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=_number(path, source, "num_key_value_heads", heads),
        head_dim=_number(path, source, "head_dim", hidden // max(heads, 1)),
        ffn=_number(path, source, "moe_intermediate_size" if sparse else "intermediate_size"),
        vocab=_number(path, source, "vocab_size"),
        tied=bool(source.get("tie_word_embeddings", False)),
        gated=source.get("hidden_act", "silu") not in _UNGATED,
        qk_norm=str(source.get("model_type", "")).startswith("qwen3"),
        experts=experts,
        active=_number(path, source, "num_experts_per_tok", 0) if experts else 0,
        dtype=dtype,
        kv_dtype="bfloat16" if dtype in ("fp8", "int8", "int4") else dtype,
        context=_number(path, source, "max_position_embeddings", 131_072),
    )


def _source(path: Path) -> dict[str, Any]:
    """Return what a file says of the model, or of the part of it that is of text."""
    try:
        source = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}; give the config.json of a model") from None
    text = source.get("text_config") or {} if isinstance(source, dict) else None
    if not isinstance(text, dict):
        raise ConfigError(f"{path}: it is no object of keys; give the config.json of a model")
    return {**source, **text}


def _number(path: Path, source: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return a whole number; `default`, where there is one, stands for none and for null."""
    found = source.get(key)
    if found is None and default is not None:
        return default
    if not isinstance(found, int):
        raise ConfigError(f"{path}: {key} is {found!r}; it must be a whole number")
    return found


def _dtype(path: Path, source: Mapping[str, Any]) -> str:
    """Number format of the weights: of the quantisation if there is one."""
    quantised = source.get("quantization_config") or {}
    if not isinstance(quantised, dict):
        raise ConfigError(f"{path}: quantization_config is {quantised!r}; it must have keys")
    method = str(quantised.get("quant_method", ""))
    if method:
        bits = {"fp8": "fp8", "awq": "int4", "gptq": "int4"}.get(method, "")
        if quantised.get("bits") == 8:
            bits = "int8"
        if not bits:
            raise ConfigError(f"{path}: quant_method is {method!r}; known: fp8, awq, gptq")
        return bits
    dtype = str(source.get("torch_dtype") or source.get("dtype") or "bfloat16")
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"{path}: dtype is {dtype!r}; it must be one of {', '.join(DTYPE_BYTES)}")
    return dtype
