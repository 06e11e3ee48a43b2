"""Locates and loads a model's weights by name, each tensor exactly once."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pigou.models import ModelError, model_folder
from pigou.models.hf_config import quantisation_of, read_config
from pigou.models.quantisation import served_quantisation
from pigou.runtime.models.checkpoint_formats import UNUSED, read_matrix
from pigou.runtime.models.linear import FP8, Linear, WeightMatrix, make_linear
from pigou.small_file import parse_json, read_bytes, read_json

log = logging.getLogger(__name__)

WHOLE, GGUF = "model.safetensors", "model.gguf"
INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"model-(\d+)-of-(\d+)\.safetensors")
#: Files to skip, as transformers does: weights under Mistral's and Meta's own names, adapters, and
#: training leftovers.
STRAYS = [
    f"{name}.safetensors"
    for name in ("consolidated*", "adapter_*", "*_adapter", "*_lora", "lora_*", "optimizer*",
                 "scheduler*", "random_states*", "training_args*")
]  # fmt: skip
_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt"]
#: Files of a hub repository not to download.
_OTHERS = ["*/*.json", "*/*.safetensors", "*/*.txt", *STRAYS]
#: Tensors of some checkpoints that the configuration determines.
_DERIVED = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
#: Blocks of MXFP4 to dequantise at once: more would take memory for their codes.
_MXFP4_ROWS = 2**20
#: Max header bytes, by the safetensors format.
_MAX_HEADER = 100_000_000


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """A model's weight files, by precedence."""

    paths: list[Path]
    index: dict[str, str] = field(default_factory=dict)  # tensor name -> file name
    missing: frozenset[str] = frozenset()  # files of the index that do not exist


def find_weight_files(folder: Path) -> WeightFiles:
    """Select weight files: one file, indexed shards, complete shards, any; raises ModelError."""
    files = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
    strays = [path.name for path in files if any(fnmatch(path.name.lower(), s) for s in STRAYS)]
    usable = [path for path in files if path.name not in strays]
    if strays:
        log.info("%s: %s are not read: no part of the model's weights", folder, ", ".join(strays))
    if (folder / "adapter_config.json").is_file() and usable:
        log.warning("%s has an adapter (adapter_config.json), which is not applied: merge it into "
                    "the weights to use it", folder)  # fmt: skip
    if (folder / WHOLE).is_file():
        return WeightFiles([folder / WHOLE])
    if (folder / INDEX).is_file():
        return _indexed(folder, usable)
    if not usable:
        raise ModelError(_nothing(folder, strays))
    return WeightFiles(_complete_set(usable) or usable)


def _indexed(folder: Path, usable: list[Path]) -> WeightFiles:
    index = _read_index(folder / INDEX)
    named = [folder / name for name in sorted(set(index.values()))]
    present = [path for path in named if path.is_file()]
    missing = frozenset(path.name for path in named) - {path.name for path in present}
    if not missing:
        return WeightFiles(present, index)
    others = [path for path in usable if path not in present]
    if not others and not present:
        names = ", ".join(sorted(missing))
        raise ModelError(f"{folder}: {names} is missing, though {INDEX} names it; download it")
    log.warning("%s: %s names %s, not there", folder, INDEX, ", ".join(sorted(missing)))
    return WeightFiles(present + (_complete_set(others) or others), index, missing)


def _read_index(path: Path) -> dict[str, str]:
    try:
        index = read_json(path)["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path} has no weight_map: {error!r}") from None
    if not isinstance(index, dict) or not index:
        raise ModelError(f"{path} has no weight_map: it must be a map of tensor names to files")
    for name, file in index.items():
        if not isinstance(file, str) or "/" in file or "\\" in file or file.startswith("."):
            raise ModelError(f"{path}: {name!r} is in {file!r}; it must be a file of this folder")
    return index


def _complete_set(paths: Iterable[Path]) -> list[Path]:
    sets: dict[int, list[Path]] = {}
    for path in paths:
        if match := _SHARD.fullmatch(path.name):
            sets.setdefault(int(match[2]), []).append(path)
    whole = [shards for count, shards in sets.items() if len(shards) == count]
    return whole[0] if len(whole) == 1 else []


def _nothing(folder: Path, strays: list[str]) -> str:
    text = f"{folder} has no *.safetensors file in transformers' format"
    if any(name.startswith("adapter") for name in strays):
        return f"{text}: {strays[0]} is an adapter; merge it into its base model"
    if strays:
        return f"{text}: {', '.join(strays)} is in its maker's own; convert it"
    for path in [*sorted(folder.glob("*.bin")), *sorted(folder.glob("*.pth"))]:
        return f"{text}: {path.name} is PyTorch's; convert it (save_pretrained writes such)"
    return text


def find_model(model: str | Path) -> Path:
    """Return a local folder, or download a hub id; raises ModelError if neither works."""
    if (folder := model_folder(model)) is not None:
        return folder
    name = str(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=_FILES, ignore_patterns=_OTHERS))
    except LocalEntryNotFoundError:
        raise ModelError(
            f"model {name!r} is no local folder, is not in the hub's cache, and the hub cannot "
            "be reached; give a folder, or connect (HF_HUB_OFFLINE must not be set)"
        ) from None
    except (HfHubHTTPError, ValueError) as error:
        raise ModelError(f"model {name!r} cannot be had from the hub: {error}") from None


def digest_model(folder: Path, *formats: str) -> str:
    """Hash config, each tensor's name, type, shape, first 4 KiB, and formats; 16 hex digits.

    Fine-tuned models differ even if some layers were frozen. Raises ModelError on a damaged file.
    """
    digest = hashlib.blake2b(digest_size=8)
    digest.update(read_bytes(folder / "config.json"))
    if set(formats) - {"auto"}:
        digest.update(repr(formats).encode())
    if (folder / GGUF).is_file():
        with (folder / GGUF).open("rb") as file:
            end = file.seek(0, 2)
            for at in range(0, end, max(4096, end // 1024)):
                file.seek(at)
                digest.update(file.read(4096))
        return digest.hexdigest()
    for path in sorted(find_weight_files(folder).paths):
        with path.open("rb") as file:
            size = file.read(8)
            length = int.from_bytes(size, "little")
            header = file.read(length) if length <= _MAX_HEADER else b""
            try:
                entries = [e for e in parse_json(header).values() if "data_offsets" in e]
            except (ValueError, AttributeError, TypeError):
                raise ModelError(f"{path} is damaged: its header is not JSON") from None
            digest.update(header)
            for entry in entries:
                first, last = entry["data_offsets"]
                file.seek(8 + len(header) + first)
                digest.update(file.read(min(last - first, 4096)))
    return digest.hexdigest()


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
