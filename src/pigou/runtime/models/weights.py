"""Locates and loads a model's weights by name, each tensor exactly once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pigou.models import ModelError
from pigou.models.hf_config import quantisation_of, read_config
from pigou.models.quantisation import served_quantisation
from pigou.models.weight_files import INDEX, find_weight_files
from pigou.runtime.models.checkpoint_formats import UNUSED, read_matrix
from pigou.runtime.models.linear import FP8, Linear, WeightMatrix, make_linear

log = logging.getLogger(__name__)

#: Tensors of some checkpoints that the configuration determines.
_DERIVED = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
#: Blocks of MXFP4 to dequantise at once: more would take memory for their codes.
_MXFP4_ROWS = 2**20


class Part(NamedTuple):
    """Part of a tensor along one axis."""

    axis: int
    first: int
    length: int
    whole: int  # the tensor's own length along the axis
    share: float = 1.0  # factor, for what each rank adds a share of

    def uncut(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the whole tensor."""
        return (*shape[: self.axis], self.whole, *shape[self.axis + 1 :])


class WeightSource:
    """A model's tensors by Hugging Face names, and products with them."""

    def __init__(
        self, dtype: torch.dtype, device: torch.device, quantization: str = "auto"
    ) -> None:
        """`quantization` is int8, fp8, none (plain numbers), or auto for the checkpoint's own."""
        self.dtype, self.device, self.quantization = dtype, device, quantization

    def __contains__(self, name: str) -> bool:
        raise NotImplementedError

    def take(self, name: str, *shape: int) -> Tensor:
        """Return a tensor in the model's dtype and device; raises ModelError if not as expected."""
        raise NotImplementedError

    def skip(self, prefix: str) -> None:
        """Let tensors whose names begin with a prefix be left unread."""

    def check_taken(self) -> None:
        """Raise ModelError if a tensor was neither taken nor skipped."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Check that all was taken, unless loading failed."""
        if kind is None:
            self.check_taken()

    def matrix(self, module: str, outputs: int, inputs: int) -> WeightMatrix:
        """Return a module's weight as stored; raises ModelError if not as expected."""
        return WeightMatrix(self.take(f"{module}.weight", outputs, inputs))

    def linear(
        self, matrix: WeightMatrix, bias: Tensor | None = None, *, head: bool = False
    ) -> Linear:
        """Return the product with a matrix in the requested format; fp8 spares the output layer.

        FP8 on CPU is dequantised once: a product with it would take 30 times as long.
        """
        if self.quantization == "none":
            matrix = WeightMatrix(matrix.dense(self.dtype))
        elif self.quantization == "int8":
            matrix = matrix.quantised(torch.int8)
        elif self.quantization == "fp8" and not head:
            matrix = matrix.quantised(FP8)
        if matrix.data.dtype is FP8 and self.device.type == "cpu":
            dense = matrix.dense(self.dtype)
            matrix = WeightMatrix(dense, input_scale=matrix.input_scale)
        return make_linear(matrix, bias, self.dtype)


class Weights(WeightSource):
    """Tensors of safetensors files, each to be taken once; the index decides on duplicates."""

    def __init__(
        self, folder: Path, dtype: torch.dtype, device: torch.device,
        quantization: str = "auto", part: Callable[[str], Part | None] | None = None,
    ) -> None:  # fmt: skip
        """Open the files; raises ModelError if one is damaged or there are none.

        `part` tells which part of a tensor, by its name, `take` reads; None for all of it.
        """
        super().__init__(dtype, device, quantization)
        self._part = part or (lambda _: None)
        self._folder = folder
        self._files: dict[str, Any] = {}
        self._converted: set[torch.dtype] = set()  # dtypes other than the model's
        self._where: dict[str, str] = {}
        self._taken: set[str] = set()
        keys = quantisation_of(read_config(folder)) if (folder / "config.json").is_file() else None
        self._formats = served_quantisation("config.json", keys)
        self._source = find_weight_files(folder)
        for path in self._source.paths:
            self._open(path)

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def skip(self, prefix: str) -> None:
        """Let tensors whose names begin with a prefix be left unread."""
        self._taken.update(name for name in self._where if name.startswith(prefix))

    def take(self, name: str, *shape: int) -> Tensor:
        """Return a tensor in the model's dtype and device; raises ModelError if not as expected."""
        if name not in self._where:
            named, why = self._source.index.get(name), ""
            if named in self._source.missing:
                why = f": {named} is missing, though {INDEX} names it; download it"
            raise ModelError(f"{self._folder}: tensor {name!r} is missing{why}")
        file = self._files[self._where[name]]
        stored = file.get_slice(name)
        part, held = self._part(name), tuple(stored.get_shape())
        wanted = shape if part is None else part.uncut(shape)
        if held != wanted:
            raise ModelError(f"{self._folder}: tensor {name!r} has shape {held}, not {wanted}")
        if part is None:
            tensor: Tensor = file.get_tensor(name)
        else:
            cut = slice(part.first, part.first + part.length)
            tensor = stored[:, cut] if part.axis else stored[cut]
        if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
            reason = "config.json has no quantization_config for it; keep the checkpoint's"
            if self._formats is not None:
                reason = "it is read in 16 or 32 bits only; give a checkpoint with it in bf16"
            raise ModelError(f"{self._folder}: tensor {name!r} has dtype {tensor.dtype}; {reason}")
        self._taken.add(name)
        if tensor.dtype is not self.dtype and tensor.dtype not in self._converted:
            log.info(
                "%s: weights in %s are converted to %s", self._folder, tensor.dtype, self.dtype
            )
            self._converted.add(tensor.dtype)
        if part is not None and part.share != 1:
            tensor = tensor * part.share
        return tensor.to(device=self.device, dtype=self.dtype)

    def take_all(self) -> dict[str, Tensor]:
        """Return all tensors, derived ones aside, in their own shapes."""
        packed = {name.removesuffix("_blocks") for name in self._where if name.endswith("_blocks")}
        tensors = {name: self._take_mxfp4(name) for name in packed}
        for name, file in self._where.items():
            if not name.endswith(_DERIVED) and name not in self._taken:
                tensors[name] = self.take(name, *self._files[file].get_slice(name).get_shape())
        return tensors

    def _take_mxfp4(self, name: str) -> Tensor:
        """Return gpt-oss's experts in the model's dtype, (experts, inputs, outputs)."""
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        blocks, scales = self._find(f"{name}_blocks"), self._find(f"{name}_scales")
        if blocks is None or scales is None:
            raise ModelError(f"{self._folder}: tensor '{name}_scales' is missing")
        numbers: Tensor = convert_moe_packed_tensors(
            blocks, scales, dtype=self.dtype, rows_per_chunk=_MXFP4_ROWS
        )
        return numbers.to(self.device)

    def matrix(self, module: str, outputs: int, inputs: int) -> WeightMatrix:
        """Return a module's weight as stored; raises ModelError if not as expected."""
        formats, name = self._formats, f"{module}.weight"
        bare = module.removeprefix("model.")
        if formats is None or formats.format_of([bare]) == formats.unquantised:
            return super().matrix(module, outputs, inputs)
        part, shape = self._part(name), (outputs, inputs)
        matrix = read_matrix(
            self._find, module, shape if part is None else part.uncut(shape), formats
        )
        if part is not None:
            cut = matrix.columns if part.axis else matrix.rows
            matrix = cut(part.first, part.first + part.length)
        return matrix.to(self.device)

    def _find(self, name: str) -> Tensor | None:
        if name not in self._where:
            return None
        self._taken.add(name)
        tensor: Tensor = self._files[self._where[name]].get_tensor(name)
        return tensor

    def check_taken(self) -> None:
        """Close the files; raise ModelError if a tensor was not taken, derived ones aside."""
        self._files.clear()
        left = sorted(self._where.keys() - self._taken)
        if self._formats is not None:
            left = [name for name in left if not name.endswith(UNUSED)]
        derived = [name for name in left if name.endswith(_DERIVED)]
        if derived:
            log.info("%s: %d tensors follow from config.json: %s", self._folder, len(derived),
                     ", ".join(derived[:3]))  # fmt: skip
        unknown = [name for name in left if name not in derived]
        if unknown:
            more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
            raise ModelError(
                f"{self._folder}: unexpected tensor {unknown[0]!r}{more}; config.json describes "
                "a model without it"
            )

    def _open(self, path: Path) -> None:
        try:
            file = safe_open(path, framework="pt")
            keys: list[str] = list(file.keys())  # type: ignore[no-untyped-call]
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is damaged: {error}") from None
        self._files[path.name] = file
        for key in keys:
            if key in self._where:
                self._choose(key, path.name)
            else:
                self._where[key] = path.name

    def _choose(self, key: str, file: str) -> None:
        first = self._where[key]
        if torch.equal(self._files[first].get_tensor(key), self._files[file].get_tensor(key)):
            return
        named = self._source.index.get(key)
        if named not in (first, file):
            raise ModelError(
                f"{self._folder}: tensor {key!r} differs between {first} and {file}; remove the "
                f"file that is no part of the model, or name one in {INDEX}"
            )
        self._where[key] = named
        log.warning("%s: tensor %r differs between %s and %s; %s names %s", self._folder, key,
                    first, file, INDEX, named)  # fmt: skip
