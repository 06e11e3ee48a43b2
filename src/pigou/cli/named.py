"""Options of the form NAME[,key=value]...: something by name, with its parameters."""

from __future__ import annotations

import msgspec

from pigou.config import ConfigError


def named(option: str, text: str) -> tuple[str, dict[str, object]]:
    """Read an option's text: its name, and its parameters, numbers where they are numbers.

    A dot in a key reaches into a nested parameter: `table.below.temperature=0.1`.

    Raises:
        ConfigError: a part has no name or no value, or is given twice.
    """
    name, *rest = text.split(",")
    if not name:
        raise ConfigError(f"{option} is {text!r}; write NAME or NAME,key=value")
    values: dict[str, object] = {}
    for item in rest:
        key, equals, value = item.partition("=")
        if not key or not equals:
            raise ConfigError(f"{option}: {item!r} is not understood; write key=value after NAME")
        _put(option, values, key.split("."), _read(value))
    return name, values


def _put(option: str, values: dict[str, object], path: list[str], value: object) -> None:
    for part in path[:-1]:
        inner = values.setdefault(part, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{option}: {part} has a value, and parts as well")
        values = inner
    if path[-1] in values:
        raise ConfigError(f"{option}: {'.'.join(path)} is given twice; give it once")
    values[path[-1]] = value


def _read(text: str) -> object:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
