"""Which files of a folder hold the model's weights, as transformers and vLLM choose them."""

from __future__ import annotations

import fnmatch
import json
import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from pigou.models import ModelError

log = logging.getLogger(__name__)

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"model-(\d+)-of-(\d+)\.safetensors")
#: Files beside the weights, which transformers does not read either: weights in Mistral's and
#: Meta's own names, adapters, and what trainers leave behind.
STRAYS = (
    "consolidated*.safetensors",
    "adapter_*.safetensors",
    "*_adapter.safetensors",
    "*_lora.safetensors",
    "lora_*.safetensors",
    "optimizer*.safetensors",
    "scheduler*.safetensors",
    "random_states*.safetensors",
    "training_args*.safetensors",
)


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """Files of a model's weights, those that win first.

    Attributes:
        paths: files that are there.
        index: tensor name -> file name, from the index; empty where there is none.
        missing: files that the index names and that are not there.
    """

    paths: list[Path]
    index: dict[str, str] = field(default_factory=dict)
    missing: frozenset[str] = frozenset()


def find_weight_files(folder: Path) -> WeightFiles:
    """Choose the weight files of a folder.

    `model.safetensors` comes first, then the shards of the index, then a complete set of
    shards, then all other files; strays are left out.

    Raises:
        ModelError: there are none that can be read; says what is there instead.
    """
    found = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
    usable = [path for path in found if not _is_stray(path.name)]
    _mention_strays(folder, found, usable)
    if (folder / WHOLE).is_file():
        return WeightFiles([folder / WHOLE])
    if (folder / INDEX).is_file():
        return _indexed(folder, usable)
    if not usable:
        raise ModelError(_nothing(folder, [path.name for path in found]))
    return WeightFiles(_complete_set(usable) or usable)


def _is_stray(name: str) -> bool:
    return any(fnmatch.fnmatch(name.lower(), pattern) for pattern in STRAYS)


def _mention_strays(folder: Path, found: list[Path], usable: list[Path]) -> None:
    strays = [path.name for path in found if path not in usable]
    if strays:
        log.info("%s: %s are not read: no part of the model's weights", folder, ", ".join(strays))
    if (folder / "adapter_config.json").is_file() and usable:
        log.warning(
            "%s has an adapter (adapter_config.json), which is not applied: merge it into the "
            "weights to use it",
            folder,
        )


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
        index = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path} has no weight_map: {error!r}") from None
    if not isinstance(index, dict) or not index:
        raise ModelError(f"{path} has no weight_map: it must be a map of tensor names to files")
    for name, file in index.items():
        if not isinstance(file, str) or "/" in file or "\\" in file or file.startswith("."):
            raise ModelError(f"{path}: {name!r} is in {file!r}; it must be a file of this folder")
    return index


def _complete_set(paths: Iterable[Path]) -> list[Path]:
    """Return the only complete set of numbered shards; [] for none, or several."""
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
    torch_files = sorted(path.name for path in folder.glob("*.bin"))
    torch_files += sorted(path.name for path in folder.glob("*.pth"))
    if torch_files:
        return f"{text}: {torch_files[0]} is PyTorch's; convert it (save_pretrained writes such)"
    return text
