"""Packed files: `.gz` and `.zst` are unpacked as they are read, and packed as they are written."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import IO, TYPE_CHECKING, Any, cast

from pigou.config import ConfigError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

#: Files of `zstd --long=27` have this window.
_WINDOW = 1 << 27
#: Chunk size in bytes of a packed file.
_CHUNK = 1 << 14


def unpacked(path: str | Path) -> IO[bytes]:
    """Open a file to read its content, unpacked; a damaged one raises ConfigError when read."""
    path = Path(path)
    if path.suffix not in (".gz", ".zst"):
        return path.open("rb")
    zstandard = _zstandard(path) if path.suffix == ".zst" else None
    file = path.open("rb")
    parts = _unzipped(file) if zstandard is None else _unframed(file, zstandard)
    return io.BufferedReader(_Reader(path, file, parts))


def packing(path: str | Path) -> IO[bytes]:
    """Open a file for writing, packed by its suffix; overwrites."""
    path = Path(path)
    if path.suffix == ".gz":
        return cast(IO[bytes], gzip.open(path, "wb"))
    if path.suffix != ".zst":
        return path.open("wb")
    packer = _zstandard(path).ZstdCompressor(write_checksum=True)
    return cast(IO[bytes], packer.stream_writer(path.open("wb"), closefd=True))


def name_of(path: str | Path) -> str:
    """Return a file's name without its packing suffix."""
    return Path(path).name.removesuffix(".gz").removesuffix(".zst")


class _Reader(io.RawIOBase):
    """What is in a packed file, from the parts that it unpacks to."""

    def __init__(self, path: Path, file: IO[bytes], parts: Iterator[bytes]) -> None:
        self._path, self._file, self._parts = path, file, parts
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        view = memoryview(buffer).cast("B")
        while not self._rest:
            part = self._next()
            if part is None:
                return 0
            self._rest = memoryview(part)
        count = min(len(view), len(self._rest))
        view[:count], self._rest = self._rest[:count], self._rest[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()

    def _next(self) -> bytes | None:
        try:
            return next(self._parts, None)
        except EOFError:
            raise ConfigError(
                f"{self._path} is cut off: it ends within what is packed; fetch or pack it again"
            ) from None
        except (zlib.error, gzip.BadGzipFile, _DamagedError) as error:
            raise ConfigError(
                f"{self._path} is no whole {self._path.suffix} file ({error}); "
                "fetch or pack it again"
            ) from None


class _DamagedError(Exception):
    """What zstandard cannot unpack."""


def _unzipped(file: IO[bytes]) -> Iterator[bytes]:
    with gzip.open(file) as reader:
        while part := reader.read(_CHUNK):
            yield part


def _unframed(file: IO[bytes], zstandard: ModuleType) -> Iterator[bytes]:
    """Unpack frame by frame: a stream's reader takes the end of the file for that of a frame."""
    unpacker = zstandard.ZstdDecompressor(max_window_size=_WINDOW)
    frame: Any = None
    data = b""
    while data := data or file.read(_CHUNK):
        frame = frame or unpacker.decompressobj()
        try:
            yield frame.decompress(data)
        except zstandard.ZstdError as error:
            raise _DamagedError(error) from None
        data = frame.unused_data
        if frame.eof:
            frame = None
    if frame is not None:
        raise EOFError


def _zstandard(path: Path) -> ModuleType:
    try:
        import zstandard
    except ImportError:
        raise ConfigError(
            f"{path} is packed by zstd; install zstandard, or name a file that is not"
        ) from None
    return zstandard
