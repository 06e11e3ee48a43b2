"""HfConfig: typed access to a `config.json`, completed from `hf_quant_config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pigou.config import ConfigError
from pigou.small_file import read_json

#: Keys of the language model in multimodal configs.
_TEXT_KEYS = ("text_config", "llm_config", "language_config")
#: Max size of layers and heads.
_MAX_SIZE = 1 << 30
#: Max file size; an NVFP4 checkpoint lists 23,000 modules in 2 MB.
_MAX_BYTES = 16 << 20
#: Keys for the modules excluded from quantisation.
EXCLUDED_KEYS = (
    "exclude_modules", "ignore", "ignored_layers", "modules_to_not_convert",
    "llm_int8_skip_modules",
)  # fmt: skip


class HfConfig:
    """Keys of a `config.json`; the language model's override outer ones."""

    def __init__(self, path: Path, source: Mapping[str, Any]) -> None:
        self.path = path
        self.used: set[str] = set()
        text: Any = next((source[key] for key in _TEXT_KEYS if source.get(key) is not None), {})
        if not isinstance(text, dict):
            raise ConfigError(f"{path}: it is no object of keys; give the config.json of a model")
        self.model_keys = set(text or source)  # keys of the language model
        self.outer_type = str(source.get("model_type") or "")
        inner = {key: v for key, v in text.items() if v is not None or key not in source}
        self.values = {**source, **inner}

    def get(self, *keys: str) -> Any:
        """Return the first set value of `keys`, or None."""
        self.used.update(keys)
        return next((self.values[key] for key in keys if self.values.get(key) is not None), None)

    def count(self, *keys: str, default: int | None = None) -> int:
        """Return the first set integer of `keys`, or `default`; else raises ConfigError."""
        value = self.get(*keys)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_SIZE:
            raise self.error(keys[0], f"it must be a whole number, at most {_MAX_SIZE}")
        return value

    def size(self, *keys: str, default: int | None = None) -> int:
        """Return a positive integer (see `count`)."""
        value = self.count(*keys, default=default)
        if value < 1:
            raise self.error(keys[0], "it must be a whole number above 0")
        return value

    def flag(self, key: str, *, default: bool = False) -> bool:
        """Return a boolean."""
        value = self.get(key)
        return default if value is None else bool(value)

    def items(self, key: str, count: int) -> list[Any] | None:
        """Return a list of one item per layer, or None; raises ConfigError on another length."""
        value = self.get(key)
        if not isinstance(value, list):
            if value is None:
                return None
            raise self.error(key, f"it must be a list of {count} layers")
        if len(value) != count:
            raise ConfigError(f"{self.path}: {key} has {len(value)} layers of {count}")
        return value

    def error(self, key: str, remedy: str) -> ConfigError:
        """Build the error for a key, with its value and the remedy."""
        return ConfigError(f"{self.path}: {key} is {self.values.get(key)!r}; {remedy}")


def read_config(path: Path) -> dict[str, Any]:
    """Read a `config.json`, completed by `hf_quant_config.json`; raises ConfigError."""
    path = path / "config.json" if path.is_dir() else path
    source = _read_object(path)
    quant_file = path.with_name("hf_quant_config.json")
    if not quant_file.is_file():
        return source
    given = _read_object(quant_file).get("quantization")
    if not isinstance(given, dict):
        raise ConfigError(f"{quant_file}: quantization is {given!r}; it must be an object")
    own = quantisation_of(source) or {}
    for key in ("quant_algo", "kv_cache_quant_algo"):
        if None not in (own.get(key), given.get(key)) and own[key] != given[key]:
            raise ConfigError(
                f"{quant_file}: {key} is {given[key]!r}, and {own[key]!r} in config.json; "
                "keep the file of this checkpoint"
            )
    if any(own.get(key) is not None for key in EXCLUDED_KEYS):
        given = {key: value for key, value in given.items() if key not in EXCLUDED_KEYS}
    known = {key: value for key, value in own.items() if value is not None}
    return {**source, "quantization_config": {"quant_method": "modelopt", **given, **known}}


def quantisation_of(source: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the quantisation config, None if unquantised; raises ConfigError if no object."""
    for part in (source, *(source.get(key) for key in _TEXT_KEYS)):
        for key in ("quantization_config", "compression_config"):
            value = part.get(key) if isinstance(part, Mapping) else None
            if value and not isinstance(value, dict):
                raise ConfigError(f"{key} is {value!r}; it must be an object")
            if value:
                return dict(value)
    return None


def _read_object(path: Path) -> dict[str, Any]:
    try:
        source = read_json(path, _MAX_BYTES)
    except (OSError, ValueError) as error:
        reason = error if isinstance(error, OSError) else f"it is not JSON: {error}"
        raise ConfigError(f"{path}: {reason}; give the config.json of a model") from None
    if not isinstance(source, dict):
        raise ConfigError(f"{path}: it is no object of keys; give the config.json of a model")
    return source
