"""Finds a model's folder and weight files, and hashes them, without torch."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from pigou.models import ModelError, model_folder
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
    if not others:
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
