"""A model's weights: found, opened, and handed out by name, each exactly once."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pigou.runtime.errors import ModelError

_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt"]
_INDEX = "model.safetensors.index.json"
#: Tensors that some checkpoints carry and that follow from the configuration.
_DERIVED = (".rotary_emb.inv_freq",)


def find_model(model: str | Path) -> Path:
    """Return the folder of a model: a local folder as it is, or a hub id, downloaded.

    Raises:
        ModelError: neither a folder nor a hub id that can be had.
    """
    folder = Path(model)
    if folder.is_dir():
        return folder
    name = str(model)
    if name.count("/") > 1 or name.startswith((".", "/", "~")) or folder.exists():
        raise ModelError(f"model {name!r} is no folder; give a folder or a Hugging Face hub id")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=_FILES))
    except LocalEntryNotFoundError:
        raise ModelError(
            f"model {name!r} is no local folder, is not in the hub's cache, and the hub cannot "
            "be reached; give a folder, or connect (HF_HUB_OFFLINE must not be set)"
        ) from None
    except (HfHubHTTPError, ValueError) as error:
        raise ModelError(f"model {name!r} cannot be had from the hub: {error}") from None


def digest_model(folder: Path) -> str:
    """Return 16 hex digits that tell models apart.

    Of config.json, and of every tensor its name, type, shape and first numbers (4 KiB): quick,
    and a fine-tuned model differs from its base even if some of its layers were frozen.

    Raises:
        ModelError: a weights file is damaged.
    """
    digest = hashlib.blake2b(digest_size=8)
    digest.update((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            size = file.read(8)
            header = file.read(int.from_bytes(size, "little"))
            try:
                entries = [e for e in json.loads(header).values() if "data_offsets" in e]
            except (ValueError, AttributeError):
                raise ModelError(f"{path} is damaged: its header is not JSON") from None
            digest.update(header)
            for entry in entries:
                first, last = entry["data_offsets"]
                file.seek(8 + len(header) + first)
                digest.update(file.read(min(last - first, 4096)))
    return digest.hexdigest()


class Weights:
    """The tensors of a folder's safetensors files, taken one by one.

    A context manager: on a clean exit every tensor must have been taken.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._folder = folder
        self._dtype = dtype
        self._device = device
        self._files: dict[str, Any] = {}
        self._where: dict[str, str] = {}
        self._taken: set[str] = set()
        for name in self._names():
            self._open(name)

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def take(self, name: str, *shape: int) -> Tensor:
        """Return a tensor in the model's dtype, on its device.

        Raises:
            ModelError: it is missing, or has another shape.
        """
        if name not in self._where:
            raise ModelError(f"{self._folder}: tensor {name!r} is missing")
        tensor: Tensor = self._files[self._where[name]].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"{self._folder}: tensor {name!r} has shape {tuple(tensor.shape)}, not {shape}"
            )
        self._taken.add(name)
        return tensor.to(device=self._device, dtype=self._dtype)

    def skip(self, name: str) -> None:
        """Say that a tensor, if it is there, is not needed."""
        self._taken.add(name)

    def __enter__(self) -> Weights:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the files; refuse tensors that nobody took."""
        self._files.clear()
        if kind is None:
            left = sorted(n for n in self._where.keys() - self._taken if not n.endswith(_DERIVED))
            if left:
                more = f" and {len(left) - 1} more" if len(left) > 1 else ""
                raise ModelError(f"{self._folder}: unexpected tensor {left[0]!r}{more}")

    def _names(self) -> list[str]:
        index = self._folder / _INDEX
        if index.exists():
            try:
                return sorted(set(json.loads(index.read_text())["weight_map"].values()))
            except (ValueError, KeyError, AttributeError) as error:
                raise ModelError(f"{index} has no weight_map: {error!r}") from None
        names = sorted(path.name for path in self._folder.glob("*.safetensors"))
        if not names:
            raise ModelError(f"{self._folder} has no *.safetensors file")
        return names

    def _open(self, name: str) -> None:
        path = self._folder / name
        if not path.exists():
            raise ModelError(f"{path} is missing, though {_INDEX} names it")
        try:
            file = safe_open(path, framework="pt")
            keys: list[str] = list(file.keys())  # type: ignore[no-untyped-call]
        except SafetensorError as error:
            raise ModelError(f"{path} is damaged: {error}") from None
        self._files[name] = file
        for key in keys:
            if key in self._where:
                raise ModelError(f"{path}: tensor {key!r} is also in {self._where[key]}")
            self._where[key] = name
