"""Reads and checks the values of options."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence
from pathlib import Path

import msgspec
import typer

from pigou.config import ConfigError, RunError, key_values
from pigou.kv.tier_config import parse_size
from pigou.request import SECOND
from pigou.small_file import read_json

#: Seconds; some more would be no integer of 64 bits in nanoseconds.
_MAX_SECONDS = 10**9


def nanoseconds(option: str, seconds: float) -> int:
    """Return the nanoseconds of an option's seconds."""
    if not 0 <= seconds < float("inf"):
        raise ConfigError(f"{option} is {seconds}; it must be finite, at least 0 seconds")
    if seconds > _MAX_SECONDS:
        raise ConfigError(f"{option} is {seconds}; it must be at most {_MAX_SECONDS} seconds")
    return int(seconds * SECOND)


def number_or_text(text: str) -> float | str:
    """Return a text as a number, or the text itself if it is no number."""
    try:
        return float(text)
    except ValueError:
        return text


def numbers(option: str, items: Sequence[str]) -> dict[str, float]:
    """Parse repeated `NAME=NUMBER` values."""
    values: dict[str, float] = {}
    for name, value in key_values(option, items, "NAME=NUMBER").items():
        try:
            values[name] = int(value) if value.lstrip("-").isdigit() else float(value)
        except ValueError:
            raise ConfigError(f"{option}: {name} is {value!r}; give a number") from None
    return values


def sizes(option: str, items: Sequence[str]) -> dict[str, int]:
    """Parse repeated `NAME=SIZE` values to bytes; names may contain "="."""
    values: dict[str, int] = {}
    for item in items:
        name, equals, value = item.rpartition("=")
        if not name or not equals:
            raise typer.BadParameter(f"{option} {item!r} is not NAME=SIZE, as alice=20GiB")
        values[name] = parse_size(value)
    return values


def named(option: str, text: str) -> tuple[str, dict[str, object]]:
    """Read NAME[,key=value]...: the name, and the parameters, numbers where they are numbers.

    A dot in a key reaches into a nested parameter: `table.below.temperature=0.1`.
    """
    name, *rest = text.split(",")
    if not name:
        raise ConfigError(f"{option} is {text!r}; write NAME or NAME,key=value")
    values: dict[str, object] = {}
    for key, value in key_values(option, rest, "key=value after NAME").items():
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


def read_part(option: str, file: str, key: str) -> dict[str, object]:
    """Return the object under `key` of a JSON file, or the file's own where it has no such key."""
    try:
        document = read_json(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option} is {file!r}, and cannot be read as JSON: {error}") from None
    part = document.get(key, document) if isinstance(document, dict) else None
    if not isinstance(part, dict) or not part:
        raise ConfigError(f"{option} is {file!r}, which has no object {key!r}; give such a file")
    return part


def check_json(file: str, option: str = "--json") -> None:
    """Refuse a file that cannot be written, before anything runs; "" writes none."""
    path = Path(file)
    if file and not path.absolute().parent.is_dir():
        raise ConfigError(f"{option} is {file!r}, and its folder does not exist; make it first")
    if file and path.is_dir():
        raise ConfigError(f"{option} is {file!r}, a folder; name a file in it")


def json_file(out: str) -> Path:
    """Return the file of `--out`; refuses one that cannot be written, or is no .json."""
    file = Path(out)
    if file.suffix != ".json" or not file.absolute().parent.is_dir():
        raise ConfigError(f"--out is {str(file)!r}; name a .json file in a folder that exists")
    return file


def write_json(option: str, file: str, document: object) -> None:
    """Write the figures of a command as indented JSON; "" is no file."""
    try:
        if file:
            Path(file).write_bytes(msgspec.json.format(msgspec.json.encode(document)) + b"\n")
    except OSError as error:
        raise RunError(f"{option} is {file!r}: {error}") from None


def check_port(host: str, port: int) -> None:
    """Refuse `--port` where another process listens; 0, and hosts without an address, pass."""
    if not 0 < port < 2**16:
        return  # 0 takes a free one; others are refused with the rest of the configuration
    try:
        addresses = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise ConfigError(f"--host is {host!r}, and has no address: {error}") from None
    for family, kind, protocol, _, address in addresses:
        try:
            probe = socket.socket(family, kind, protocol)
        except OSError:
            continue  # the machine has no such addresses
        with probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
                probe.listen(1)
            except OSError as error:
                raise ConfigError(_port_error(host, port, error)) from None


def _port_error(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"--port is {port}, and another process listens there; give another --port, or 0 for "
            "a free one"
        )
    if error.errno == errno.EACCES:
        return f"--port is {port}, and this user may not listen there; give one above 1023"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--host is {host!r}, and is no address of this machine"
    return f"--port is {port}, and cannot be listened at: {error.strerror}"
