"""Models of random weights in the shape of published ones: to be measured, not to be read."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from pigou.runtime.models.decoder import load_decoder
from pigou.runtime.models.load import LoadedModel
from pigou.runtime.models.model_config import parse_config
from pigou.runtime.models.weights import WeightSource
from pigou.runtime.ops import KernelOps, TorchOps

#: The shape of Qwen3-0.6B.
QWEN3_600M: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
#: Small enough for any CPU.
TINY = QWEN3_600M | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 320,
    "max_position_embeddings": 2048,
}
#: Id of the checkpoint's end token, behind those of the 256 bytes.
_END_TOKEN = 256
#: How far the logits spread; else all tokens were about as probable.
_SPREAD = 4.0


class RandomWeights(WeightSource):
    """Weights seeded by name, made on one device and put on another."""

    def __init__(
        self, dtype: torch.dtype, device: torch.device, source: torch.device,
        quantization: str = "auto",
    ) -> None:  # fmt: skip
        super().__init__(dtype, device, quantization)
        self._source = source

    def __contains__(self, name: str) -> bool:
        return name != "lm_head.weight"

    def take(self, name: str, *shape: int) -> Tensor:
        """Return a weight: ones for a norm, else normal numbers scaled by their inputs."""
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=self.dtype, device=self.device)
        generator = torch.Generator(self._source).manual_seed(zlib.crc32(name.encode()))
        weight = torch.randn(shape, generator=generator, device=self._source)
        scale = shape[-1] ** -0.5 * (_SPREAD if "embed" in name else 1.0)
        return weight.mul_(scale).to(device=self.device, dtype=self.dtype)


def random_model(
    shape: dict[str, Any], device: str, dtype: torch.dtype, *, source: str = "cpu",
    quantization: str = "auto",
) -> LoadedModel:  # fmt: skip
    """Make a model of random weights, drawn on device `source`: equal sources give equal models."""
    config, torch_device = parse_config(shape), torch.device(device)
    weights = RandomWeights(dtype, torch_device, torch.device(source), quantization)
    with torch.inference_mode():
        ops = KernelOps() if torch_device.type == "cpu" else TorchOps()
        decoder = load_decoder(config, weights, ops)
    return LoadedModel("random", Path(), "random", config, decoder, dtype, torch_device)


class _RecordedWeights(RandomWeights):
    def __init__(self, dtype: torch.dtype, device: torch.device, source: torch.device) -> None:
        super().__init__(dtype, device, source)
        self.tensors: dict[str, Tensor] = {}

    def take(self, name: str, *shape: int) -> Tensor:
        weight = super().take(name, *shape)
        self.tensors[name] = weight.clone()
        return weight


def write_checkpoint(
    folder: Path, shape: dict[str, Any], dtype: torch.dtype, *, source: str = "cpu"
) -> None:
    """Write a servable checkpoint of random weights, with a byte tokenizer."""
    cpu = torch.device("cpu")
    weights = _RecordedWeights(dtype, cpu, torch.device(source))
    with torch.inference_mode():
        load_decoder(parse_config(shape), weights, TorchOps())
        save_file(weights.tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = shape | {
        "model_type": parse_config(shape).family,
        "eos_token_id": _END_TOKEN,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
