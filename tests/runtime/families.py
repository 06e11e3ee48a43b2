"""Families of transformers that are compared: what a tiny random model of each needs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VOCAB = 300
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCAB, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_WINDOW = {"sliding_window": 8}
_TWO_OF_FOUR = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 2,
    "topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
}  # fmt: skip
_LATENT = {
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
    "v_head_dim": 24, "num_key_value_heads": 4,
}  # fmt: skip
_GPT = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 256}
_SCALED = {"attention_multiplier": 0.25}

#: model_type -> configuration beyond `SIZES`; docs/guide/model-families.md lists them.
FAMILIES: dict[str, dict[str, Any]] = {
    "afmoe": {**_TWO_OF_FOUR, **_WINDOW, "num_dense_layers": 1},
    "apertus": {},
    "arcee": {},
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    "biogpt": {},
    "bitnet": {},
    "cohere": {},
    "cohere2": _WINDOW,
    "ctrl": {**_GPT, "dff": 128},
    "cwm": _WINDOW,
    "deepseek_v2": {**_LATENT, **_ROUTED},
    "deepseek_v3": {
        **_LATENT, **_ROUTED,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 1.0,
            "mscale_all_dim": 1.0, "original_max_position_embeddings": 64,
        },
    },
    "dots1": {**_ROUTED, "n_group": 1, **_WINDOW},
    "ernie4_5": {},
    "ernie4_5_moe": {
        "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    },
    "exaone4": _WINDOW,
    "exaone_moe": {
        **_TWO_OF_FOUR, **_WINDOW, "n_group": 1, "topk_group": 1, "num_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 16, **_WINDOW},
    "gemma3_text": {"query_pre_attn_scalar": 16, **_WINDOW},
    "gemma4_text": {
        **_WINDOW, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0,
        "global_head_dim": 32, "num_global_key_value_heads": 1, "enable_moe_block": False,
    },
    "glm": {},
    "glm4": {},
    "glm4_moe": {**_ROUTED, "n_group": 1},
    "glm4_moe_lite": {**_LATENT, **_ROUTED},
    "gpt2": _GPT,
    "gpt_bigcode": _GPT,
    "gpt_neox": {},
    "gpt_oss": {**_LOCAL, **_WINDOW},
    "granite": _SCALED,
    "granite_swa": {**_SCALED, **_WINDOW},
    "granitemoe": {**_SCALED, **_LOCAL},
    "granitemoe_swa": {**_SCALED, **_LOCAL, **_WINDOW},
    "granitemoeshared": {**_SCALED, **_LOCAL, "shared_intermediate_size": 32},
    "helium": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "hyperclovax": {},
    "jais2": {},
    "llama": {},
    "mimo_v2_flash": {
        **_TWO_OF_FOUR, **_WINDOW, "v_head_dim": 16, "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 1, "swa_head_dim": 16, "swa_v_head_dim": 16,
        "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
    },
    "minicpm3": _LATENT,
    "minimax_m2": _LOCAL,
    "ministral": _WINDOW,
    "ministral3": _WINDOW,
    "mistral": _WINDOW,
    "mixtral": {"num_local_experts": 4, **_WINDOW},
    "modernbert-decoder": {"local_attention": 8},
    "nanochat": {},
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": _WINDOW,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64},
    "persimmon": {},
    "phi": {},
    "phi3": _WINDOW,
    "phimoe": {"num_local_experts": 4, **_WINDOW},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 2, **_WINDOW},
    "qwen2_moe": {**_TWO_OF_FOUR, "shared_expert_intermediate_size": 32},
    "qwen3": {},
    "qwen3_moe": _TWO_OF_FOUR,
    "seed_oss": {},
    "smollm3": {},
    "solar_open": {**_ROUTED, "n_group": 1},
    "stablelm": {},
    "starcoder2": _WINDOW,
    "vaultgemma": {"query_pre_attn_scalar": 16, **_WINDOW},
    "youtu": {**_LATENT, "tie_word_embeddings": False},
}  # fmt: skip


def randomize(model: Any, seed: int = 0) -> None:
    """Fill a model with weights whose attention is sharp, and whose norms and biases are felt."""
    generator = torch.Generator().manual_seed(seed)

    def noise(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator)

    sharp = ("q_proj", "k_proj", "qkv", "c_attn", "query_key", "kv_b")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * noise(parameter))
            elif "embed" in name or "wte" in name:
                parameter.copy_(0.5 * noise(parameter))
            else:
                gain = 2.0 if any(part in name for part in sharp) else 1.0
                parameter.copy_(gain * noise(parameter) / parameter.shape[-1] ** 0.5)
            if "sinks" in name:
                parameter.copy_(noise(parameter))


def write_family(folder: Path, kind: str, **changes: Any) -> Any:
    """Write a tiny random model of a family to a folder; return transformers' own, eager."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **{**SIZES, **FAMILIES[kind], **changes})
    source = copy.deepcopy(config)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(source, attn_implementation="eager").eval()
    randomize(model)
    model.save_pretrained(folder)
    return model
