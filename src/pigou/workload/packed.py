"""Packed files: `.gz` and `.zst` are unpacked as they are read."""

from __future__ import annotations

import gzip
import io
from pathlib import Path
from typing import IO, cast

from pigou.config import ConfigError

#: Files of `zstd --long=27` have this window.
_WINDOW = 1 << 27


def unpacked(path: str | Path) -> IO[bytes]:
    """Open a file to read what is in it.

    Raises:
        OSError: it cannot be opened. ConfigError: zstandard is missing.
    """
    path = Path(path)
    if path.suffix == ".gz":
        return cast(IO[bytes], gzip.open(path))
    file = path.open("rb")
    if path.suffix != ".zst":
        return file
    try:
        import zstandard
    except ImportError:
        file.close()
        raise ConfigError(f"{path} is compressed; install zstandard, or unpack it first") from None
    unpacker = zstandard.ZstdDecompressor(max_window_size=_WINDOW)
    reader = unpacker.stream_reader(file, read_across_frames=True, closefd=True)
    return io.BufferedReader(reader)


def name_of(path: str | Path) -> str:
    """Return a file's name without the ending of its packing."""
    return Path(path).name.removesuffix(".gz").removesuffix(".zst")
