"""Reads YAML files, and refuses keys that are given twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pigou.config import ConfigError
from pigou.small_file import read_bytes


def read_yaml(path: str | Path) -> Any:
    """Return what a YAML file holds, as plain values. Raises ConfigError."""
    try:
        return load_yaml(read_bytes(path))
    except ImportError:
        raise ConfigError(f"{path}: a YAML file needs the package pyyaml; install it") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is no YAML that is understood: {error}") from error


def load_yaml(text: bytes) -> Any:
    """Return what YAML says, as plain values. Raises ValueError (one line), ImportError."""
    import yaml

    try:
        for node in _mappings(yaml.compose(text, yaml.SafeLoader)):
            _check_keys(node)
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from error


def _mappings(root: Any) -> Iterator[Any]:
    """Yield the mappings within a node, each once: aliases may lead back to where they are."""
    import yaml

    left, seen = [root], set()
    while left:
        node = left.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            yield node
            left += (value for _, value in node.value)
        elif isinstance(node, yaml.SequenceNode):
            left += node.value


def _check_keys(node: Any) -> None:
    seen = set()
    for key, _ in node.value:
        name = (key.tag, str(key.value))
        if name in seen:
            line = key.start_mark.line + 1
            raise ValueError(f"line {line} gives {key.value!r} again; give it once")
        seen.add(name)
