"""Parses HTTP/1.1 responses: heads, and the sizes of chunks."""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_HEAD_BYTES = 64 * 1024
#: Interim responses (1xx) before the real one.
MAX_INTERIM = 16
#: Bytes of a chunk's size line, and of all trailers.
MAX_SIZE_LINE_BYTES = 1024
MAX_TRAILER_BYTES = 16 * 1024
_HEX = re.compile(rb"[0-9a-fA-F]+")
#: Hexadecimal digits of a chunk's size: up to 2^32 bytes.
_MAX_SIZE_DIGITS = 8
#: Bytes that take as long to parse as a line break: a chunk has a cost, however short it is.
_BREAK_COST = 64


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """Status and headers (names in lower case) of a response."""

    status: int
    headers: dict[bytes, bytes]


def parse_cost(data: bytes) -> int:
    """Return how many bytes without line breaks take as long to parse as these."""
    return max(len(data), _BREAK_COST * data.count(b"\r\n"))


def parse_head(data: bytes) -> ResponseHead:
    """Return status and headers; `data` ends before the blank line.

    Raises:
        ValueError, IndexError: it is no HTTP/1 head.
    """
    first, *lines = data.split(b"\r\n")
    headers = {}
    for line in lines:
        name, _, value = line.partition(b":")
        headers[name.strip().lower()] = value.strip()
    version, code, *_ = first.split(b" ", 2)
    if not version.startswith(b"HTTP/1.") or not code.isdigit() or len(code) != 3:
        raise ValueError(f"a status line {first[:60]!r}")
    return ResponseHead(int(code), headers)


def parse_chunk_size(line: bytes) -> int:
    """Return the bytes of a chunk, by its size line.

    Raises:
        ValueError: the line has no such number.
    """
    digits = line.partition(b";")[0].strip()
    if len(digits.lstrip(b"0")) > _MAX_SIZE_DIGITS or not _HEX.fullmatch(digits):
        raise ValueError(f"a chunk of {line[:40]!r} bytes")
    return int(digits, 16)
