#!/usr/bin/env python3
"""Write a random-weight checkpoint in Hugging Face format, without transformers.

    make_random_checkpoint.py OUT --family qwen2 --hidden 896 --layers 24 --heads 14 \\
        --kv-heads 2 --ffn 4864 --vocab 8192 --tie

OUT receives config.json, generation_config.json, tokenizer.json (byte-level BPE trained
on a built-in text), tokenizer_config.json with a chat template, and model.safetensors.
Every tensor has its own generator, seeded by the seed and the tensor's name, so that
equal arguments give equal bytes on any machine; the printed digest shows it.

Scales are chosen so that a mistake is visible: attention depends on the prompt, norms
differ from one, and biases are as large as the activations that they are added to.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
SPECIAL_TOKENS = ["<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
TEXT = """\
Two roads lead from the village to the market. The short one is narrow: it takes as many
minutes as it has carts upon it. The long one is wide, and always takes the same time,
however many choose it. Every carter who looks only at his own clock takes the short
road, until it is as slow as the long one, and then nobody gains anything from its being
short. If each cart paid a small toll for the minutes that it adds to all the others,
half of them would go round by the wide road, and the whole village would be home sooner.

def route(request, workers):
    prices = {w.name: w.delay(request) + w.toll(request) for w in workers}
    return min(prices, key=prices.get)

{"model": "random", "messages": [{"role": "user", "content": "Where is the market?"}],
 "temperature": 0.0, "max_tokens": 32, "stream": true, "stop": ["\\n\\n"]}

1. Count the carts. 2. Read the clock at the gate. 3. Publish both, and the price as well.
"""


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder-only transformer; ``head_dim`` need not be hidden / heads."""

    family: str = "llama"
    hidden: int = 256
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    ffn: int = 688
    vocab: int = 2048
    max_len: int = 4096
    rope_theta: float = 10_000.0
    rms_eps: float = 1e-6
    tie: bool = False

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ValueError(f"family {self.family!r} is not one of {sorted(FAMILIES)}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd; rotary embedding needs pairs")


def config(shape: Shape, dtype: str) -> dict[str, Any]:
    """The fields of config.json, under the names that every transformers release reads."""
    common: dict[str, Any] = {
        "architectures": [FAMILIES[shape.family]],
        "model_type": shape.family,
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_len,
        "rms_norm_eps": shape.rms_eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": shape.tie,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": dtype,
        "use_cache": True,
    }
    if shape.family == "llama":
        common |= {"attention_bias": False, "mlp_bias": False}
    if shape.family == "mistral":
        common |= {"sliding_window": None}
    if shape.family in ("qwen2", "qwen3"):
        common |= {"use_sliding_window": False}
    if shape.family == "qwen3":
        common |= {"attention_bias": False}
    return common


def tensor_sizes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Name and size of every tensor in the checkpoint; weights are [out, in]."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (shape.vocab, shape.hidden),
        "model.norm.weight": (shape.hidden,),
    }
    if not shape.tie:
        sizes["lm_head.weight"] = (shape.vocab, shape.hidden)
    for i in range(shape.layers):
        layer, attn = f"model.layers.{i}", f"model.layers.{i}.self_attn"
        sizes |= {
            f"{layer}.input_layernorm.weight": (shape.hidden,),
            f"{layer}.post_attention_layernorm.weight": (shape.hidden,),
            f"{layer}.mlp.gate_proj.weight": (shape.ffn, shape.hidden),
            f"{layer}.mlp.up_proj.weight": (shape.ffn, shape.hidden),
            f"{layer}.mlp.down_proj.weight": (shape.hidden, shape.ffn),
            f"{attn}.q_proj.weight": (q, shape.hidden),
            f"{attn}.k_proj.weight": (kv, shape.hidden),
            f"{attn}.v_proj.weight": (kv, shape.hidden),
            f"{attn}.o_proj.weight": (shape.hidden, q),
        }
        if shape.family == "qwen2":
            for name, size in (("q", q), ("k", kv), ("v", kv)):
                sizes[f"{attn}.{name}_proj.bias"] = (size,)
        if shape.family == "qwen3":
            for name in ("q_norm", "k_norm"):
                sizes[f"{attn}.{name}.weight"] = (shape.head_dim,)
    return sizes


def random_tensor(name: str, size: tuple[int, ...], seed: int, tie: bool) -> torch.Tensor:
    """The float32 tensor that belongs to this name, size and seed."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:6], "big"))
    noise = torch.randn(size, generator=generator)
    if "norm" in name:
        return 1.0 + 0.1 * noise
    if name.endswith(".bias"):
        return 0.5 * noise
    if "embed_tokens" in name and not tie:
        return noise
    scale: float = size[1] ** -0.5  # keeps activations near unit variance
    if name.endswith(("q_proj.weight", "k_proj.weight")):
        scale *= 1.5  # attention sharper than a flat average
    return scale * noise


def train_tokenizer(vocab: int) -> Tokenizer:
    """A byte-level BPE of exactly ``vocab`` ids; raises ValueError when that is too few."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    # The text is short and yields fewer merges: name the other ids, so that each decodes.
    missing = vocab - tokenizer.get_vocab_size()
    if missing < 0:
        raise ValueError(f"vocab {vocab} is too small; at least {tokenizer.get_vocab_size()}")
    tokenizer.add_tokens([f" w{i}" for i in range(missing)])
    return tokenizer


def write_checkpoint(out: Path, shape: Shape, dtype: str = "bfloat16", seed: int = 0) -> str:
    """Write the checkpoint folder and return the SHA-256 of names and weights.

    ``dtype`` is a torch dtype name: bfloat16, float16 or float32. Raises ValueError for a
    vocabulary smaller than the special tokens and the 256 bytes.
    """
    out.mkdir(parents=True, exist_ok=True)
    train_tokenizer(shape.vocab).save(str(out / "tokenizer.json"))
    documents: dict[str, dict[str, Any]] = {
        "config.json": config(shape, dtype),
        "generation_config.json": {"bos_token_id": 0, "eos_token_id": 1},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "add_bos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": shape.max_len,
            "chat_template": CHAT_TEMPLATE,
        },
    }
    for name, fields in documents.items():
        text = json.dumps(fields, indent=1, sort_keys=True) + "\n"
        (out / name).write_text(text, encoding="utf-8")
    state: dict[str, torch.Tensor] = {}
    digest = hashlib.sha256()
    for name, size in sorted(tensor_sizes(shape).items()):
        weight = random_tensor(name, size, seed, shape.tie).to(getattr(torch, dtype)).contiguous()
        digest.update(name.encode())
        digest.update(weight.view(torch.uint8).numpy().tobytes())
        state[name] = weight
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    return digest.hexdigest()


def main() -> None:
    """Read the command line and write one checkpoint."""
    default = Shape()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--family", choices=sorted(FAMILIES), default=default.family)
    for name in ("hidden", "layers", "heads", "kv_heads", "ffn", "vocab", "max_len"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(default, name))
    parser.add_argument("--head-dim", type=int, help="hidden / heads when absent")
    parser.add_argument("--rope-theta", type=float, default=default.rope_theta)
    parser.add_argument("--rms-eps", type=float, default=default.rms_eps)
    parser.add_argument("--tie", action="store_true", help="output layer = input embedding")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    options = vars(parser.parse_args())
    out, dtype, seed = options.pop("out"), options.pop("dtype"), options.pop("seed")
    options["head_dim"] = options["head_dim"] or options["hidden"] // options["heads"]
    try:
        digest = write_checkpoint(out, Shape(**options), dtype, seed)
    except ValueError as error:
        parser.error(str(error))
    print(f"{out}: {options['family']} {dtype} digest {digest[:16]}")


if __name__ == "__main__":
    main()
