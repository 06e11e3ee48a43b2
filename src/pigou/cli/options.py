"""What is wrong with an option, told in the name that was typed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from pigou.config import ConfigError
from pigou.request import SECOND

#: Seconds; some more would be no integer of 64 bits in nanoseconds.
_MOST = 10**9
_HEAD = re.compile(r"([\w.]+)(?=:? (?:is|of) | ')")


def names(*configs: type[msgspec.Struct], **others: str) -> dict[str, str]:
    """Return the option of each field; `others` are those that have another name than theirs."""
    fields = [name for config in configs for name in config.__struct_fields__]
    return {name: "--" + others.get(name, name).replace("_", "-") for name in fields}


def typed(message: str, options: Mapping[str, str]) -> str:
    """Return a message about fields of a configuration in the names of their options.

    A field that is a plain word (`order`, `port`) is looked for at the beginning alone.
    """
    if (head := _HEAD.match(message)) and head[1] in options:
        message = options[head[1]] + message[head.end(1) :]
    marked = "|".join(re.escape(name) for name in options if "_" in name or "." in name)
    if not marked:
        return message
    return re.sub(rf"(?<![\w.$'/-])({marked})\b", lambda found: options[found[1]], message)


def nanoseconds(option: str, seconds: float) -> int:
    """Return the nanoseconds of an option's seconds.

    Raises:
        ConfigError: they are below 0, not finite, or more than nanoseconds are counted.
    """
    if not 0 <= seconds < float("inf"):
        raise ConfigError(f"{option} is {seconds}; it must be finite, at least 0 seconds")
    if seconds > _MOST:
        raise ConfigError(f"{option} is {seconds}; it must be at most {_MOST} seconds")
    return int(seconds * SECOND)


def check_json(file: str) -> None:
    """Refuse a `--json` that cannot be written, before anything runs; "" is none.

    Raises:
        ConfigError: its folder does not exist, or it is one.
    """
    path = Path(file)
    if file and not path.absolute().parent.is_dir():
        raise ConfigError(f"--json is {file!r}, and its folder does not exist; make it first")
    if file and path.is_dir():
        raise ConfigError(f"--json is {file!r}, a folder; name a file in it")
