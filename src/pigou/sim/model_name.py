"""Models by name: presets, their released variants, and paths to a `config.json`."""

from __future__ import annotations

import re
from pathlib import Path

from pigou.config import ConfigError
from pigou.sim.architecture import PRESETS, Architecture
from pigou.sim.model_config import read_architecture

#: Owners' prefixes of names that mean the preset without them.
_PREFIXES = ("meta-", "nvidia-")
#: Parts of a name after the preset's that change no shape.
_VARIANTS = {
    "instruct", "base", "chat", "hf", "it", "thinking", "2507", "dynamic", "block", "quantized",
    "bf16",
}  # fmt: skip
#: Parts that name the weights' format, and the one that products are computed in.
_FORMATS = {
    "fp8": ("fp8", ""), "w8a8": ("int8", ""), "int8": ("int8", "bfloat16"),
    "w8a16": ("int8", "bfloat16"), "int4": ("int4", ""), "w4a16": ("int4", ""),
    "awq": ("int4", ""), "gptq": ("int4", ""), "nvfp4": ("nvfp4", ""), "fp4": ("nvfp4", ""),
    "mxfp4": ("mxfp4", ""),
}  # fmt: skip
#: Quantisation methods, whose format another part of the name may say.
_METHODS = ("awq", "gptq")


def plain(name: str) -> str:
    """Return a model's name as it is compared: no owner, lower case, letters and digits only."""
    return "".join(c for c in name.rsplit("/", 1)[-1].lower() if c.isalnum())


def shape_name(name: str) -> str:
    """Return a plain name without the parts that change neither shapes nor layers."""
    parts = re.split(r"[^a-z0-9]+", name.rsplit("/", 1)[-1].lower())
    return "".join(part for part in parts if part not in _VARIANTS and part not in _FORMATS)


def architecture(model: str) -> Architecture:
    """Find the architecture of a preset's name, a Hugging Face id of one, or a `config.json`.

    Args:
        model: "llama-3.1-8b", "Qwen/Qwen3-32B-FP8", a folder with a `config.json`, or its path.
            What follows a preset's name must be known: a variant of equal shape ("-Instruct"),
            or the number format of its weights ("-FP8", "-AWQ", "-GPTQ-Int8", "-NVFP4").

    Raises:
        ConfigError: nothing is known by that name, or the file describes another kind of model.
    """
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return read_architecture(path)
    for preset, rest in _candidates(model):
        return _variant(model, preset, rest)
    known = ", ".join(PRESETS)
    raise ConfigError(f"model is {model!r}; it must be one of {known}, or a path to a config.json")


def _candidates(model: str) -> list[tuple[Architecture, str]]:
    """Return presets that a name begins with, the longest first, and what follows."""
    name = model.rsplit("/", 1)[-1].lower()
    matches = []
    for start in ("", *_PREFIXES):
        if not name.startswith(start):
            continue
        short = name[len(start) :]
        for key, preset in PRESETS.items():
            rest = _after(short, plain(key))
            if rest is not None:
                matches.append((len(plain(key)), preset, rest))
    return [(preset, rest) for _, preset, rest in sorted(matches, key=lambda each: -each[0])]


def _after(name: str, start: str) -> str | None:
    """Return what follows `start` in a name, punctuation aside; None where it is another name."""
    at = 0
    for place, character in enumerate(name):
        if at == len(start):
            return None if character.isalnum() else name[place:]
        if character.isalnum():
            if character != start[at]:
                return None
            at += 1
    return "" if at == len(start) else None


def _variant(model: str, preset: Architecture, rest: str) -> Architecture:
    parts = [part for part in re.split(r"[^a-z0-9]+", rest) if part]
    formats = [part for part in parts if part in _FORMATS]
    for part in parts:
        if part not in _VARIANTS and part not in _FORMATS:
            known = ", ".join(sorted(_VARIANTS | set(_FORMATS)))
            raise ConfigError(
                f"model is {model!r}: {part!r} is no known variant of {preset.name}; known are "
                f"{known}; or give a path to the config.json of the model"
            )
    precise = [part for part in formats if part not in _METHODS] or formats
    floats = len(precise) < len(formats) and any("fp" in part for part in precise)
    if floats or len({_FORMATS[part] for part in precise}) > 1:
        raise ConfigError(f"model is {model!r}, which names two number formats; give one")
    return preset.cast(*_FORMATS[precise[0]]) if precise else preset
