"""Reads small files, as JSON or YAML, that others may have written; type and size are checked."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pigou.config import ConfigError

#: Default bound of a file, in bytes.
MAX_BYTES = 64 << 20
#: The same of a `tokenizer.json`: large vocabularies take 40 MB.
MAX_TOKENIZER = 512 << 20
#: Levels of nesting that a JSON file may have.
MAX_DEPTH = 128
#: Descriptors that the shell opened for this process, as in `--config <(command)`: may be pipes.
_OWN_DESCRIPTORS = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")
_KINDS = {
    stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a directory",
    stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFLNK: "a symbolic link",
}  # fmt: skip


class FileRefused(OSError):
    """A file is not regular, or is too large."""


def check_regular(status: os.stat_result, path: str | Path, max_bytes: int = MAX_BYTES) -> None:
    """Refuse what is no regular file of at most `max_bytes`. Raises FileRefused."""
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "no file")
        raise FileRefused(errno.EINVAL, f"it is {kind}; a regular file is needed", str(path))
    if status.st_size > max_bytes:
        raise _too_large(path, f"{status.st_size}", max_bytes)


def read_bytes(path: str | Path, max_bytes: int = MAX_BYTES, *, follow: bool = True) -> bytes:
    """Return the content of a small regular file, and never block at a FIFO or device.

    A pipe that the shell opened (`<(command)`) is read; a symbolic link only where `follow`.
    Raises FileRefused: it is not regular, or has more bytes; OSError.
    """
    if str(path).startswith(_OWN_DESCRIPTORS):
        with open(path, "rb") as pipe:
            return _bounded(pipe.fileno(), path, max_bytes)
    look = os.stat if follow else os.lstat
    check_regular(look(path), path, max_bytes)  # opening a device may have effects
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    descriptor = os.open(path, flags)
    try:
        check_regular(os.fstat(descriptor), path, max_bytes)
        return _bounded(descriptor, path, max_bytes)
    finally:
        os.close(descriptor)


def read_text(path: str | Path, max_bytes: int = MAX_BYTES) -> str:
    """Return the UTF-8 text of a small regular file; raises OSError and UnicodeDecodeError."""
    return read_bytes(path, max_bytes).decode("utf-8-sig")


def read_json(path: str | Path, max_bytes: int = MAX_BYTES) -> Any:
    """Return the value of a small JSON file. Raises OSError, and ValueError as `parse_json`."""
    return parse_json(read_bytes(path, max_bytes))


def parse_json(data: bytes) -> Any:
    """Return the value of JSON, NaN and infinity included. Raises ValueError, also if too deep."""
    try:
        value = json.loads(data)
        deep = is_deep(value)
    except RecursionError:
        deep = True
    if deep:
        raise ValueError(f"it is nested more deeply than {MAX_DEPTH} levels")
    return value


def is_deep(value: Any, max_depth: int = MAX_DEPTH) -> bool:
    """Whether lists and objects are nested more deeply than `max_depth` levels."""
    level = [value]
    for _ in range(max_depth + 1):
        level = [outer for outer in level if isinstance(outer, (dict, list))]
        if not level:
            return False
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return True


def _bounded(descriptor: int, path: str | Path, max_bytes: int) -> bytes:
    """Read to the end, also where the file grows meanwhile."""
    parts, left = [], max_bytes + 1
    while left and (part := os.read(descriptor, min(left, 1 << 20))):
        parts.append(part)
        left -= len(part)
    if not left:
        raise _too_large(path, f"more than {max_bytes}", max_bytes)
    return b"".join(parts)


def _too_large(path: str | Path, size: str, max_bytes: int) -> FileRefused:
    text = f"it has {size} bytes; at most {max_bytes} are read"
    return FileRefused(errno.EFBIG, text, str(path))


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
