"""Weights of GGUF files under Hugging Face's names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pigou.models import ModelError
from pigou.models.gguf_folder import FREQUENCIES, open_gguf
from pigou.models.weight_files import GGUF
from pigou.runtime.models.linear import WeightMatrix
from pigou.runtime.models.weights import WeightSource
from pigou.small_file import read_json


class GGUFWeights(WeightSource):
    """Tensors of a GGUF file: Q8_0 as int8 with its groups of 32, others dequantised once."""

    def __init__(
        self, folder: Path, dtype: torch.dtype, device: torch.device, quantization: str = "auto"
    ) -> None:
        """Open the file of a folder made by `gguf_folder`."""
        from gguf import MODEL_ARCH, get_tensor_name_map

        super().__init__(dtype, device, quantization)
        self._folder = folder
        self._tensors = {tensor.name: tensor for tensor in open_gguf(folder / GGUF).tensors}
        config = read_json(folder / "config.json")
        family, layers = config["model_type"], config["num_hidden_layers"]
        self._names = get_tensor_name_map(MODEL_ARCH[family.upper()], layers)
        self._heads = {}  # by tensor, where llama.cpp interleaves rows for its rotary embedding
        if family == "llama":
            heads = config["num_attention_heads"]
            self._heads = {"attn_q": heads, "attn_k": config.get("num_key_value_heads", heads)}
        self._taken = {FREQUENCIES}

    def __contains__(self, name: str) -> bool:
        return self._name(name) in self._tensors

    def take(self, name: str, *shape: int) -> Tensor:
        """Return a tensor, dequantised by the package gguf."""
        from gguf import dequantize

        tensor = self._find(name, shape)
        numbers = np.array(dequantize(tensor.data, tensor.tensor_type)).reshape(shape)
        return self._ordered(name, torch.from_numpy(numbers)).to(
            device=self.device, dtype=self.dtype
        )

    def matrix(self, module: str, outputs: int, inputs: int) -> WeightMatrix:
        """Return a module's weight; Q8_0 as it is."""
        name = f"{module}.weight"
        tensor = self._find(name, (outputs, inputs))
        if tensor.tensor_type.name != "Q8_0":
            return super().matrix(module, outputs, inputs)
        blocks = torch.from_numpy(np.array(tensor.data)).view(outputs, inputs // 32, 34)
        scales = blocks[:, :, :2].contiguous().view(torch.float16).squeeze(-1).float()
        codes = blocks[:, :, 2:].contiguous().view(torch.int8).view(outputs, inputs)
        codes, scales = self._ordered(name, codes), self._ordered(name, scales)
        return WeightMatrix(codes, scales, 32).to(self.device)

    def check_taken(self) -> None:
        """Raise ModelError if a tensor was not taken."""
        if left := sorted(self._tensors.keys() - self._taken):
            raise ModelError(f"{self._folder / GGUF}: unexpected tensor {left[0]!r}")

    def _name(self, name: str) -> str:
        """Return the file's name of a tensor."""
        return self._names.get_name(name, (".weight", ".bias")) or name

    def _find(self, name: str, shape: tuple[int, ...]) -> Any:
        own = self._name(name)
        if own not in self._tensors:
            raise ModelError(f"{self._folder / GGUF}: tensor {own!r} is missing")
        tensor = self._tensors[own]
        stored = tuple(int(size) for size in reversed(tensor.shape))
        if stored != shape:
            raise ModelError(f"{self._folder / GGUF}: {own!r} has shape {stored}, not {shape}")
        self._taken.add(own)
        return tensor

    def _ordered(self, name: str, rows: Tensor) -> Tensor:
        """Undo the interleaving of rows of Llama's query and key heads."""
        heads = self._heads.get(self._name(name).split(".")[-2])
        if heads is None:
            return rows
        return rows.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
