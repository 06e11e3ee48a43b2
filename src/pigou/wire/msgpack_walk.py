"""Steps over MessagePack without decoding it, in pieces of bounded work.

A decoder holds Python's interpreter lock for as long as it works, and knows no place to stop.
The kernel here finds where values end, without that lock, and goes on where it left off.
"""

from __future__ import annotations

from collections.abc import Generator

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import kernel

#: Values that are stepped over at once: a fraction of a millisecond.
STEP = 2**17
#: Fault codes of the kernel.
_FAULTS = {1: "it is truncated", 2: "byte 0xc1 means nothing"}


class MessagePackError(ValueError):
    """What is no MessagePack, or no array where there must be one."""


#: Columns of the table of first bytes: bytes of the length that follows, -1 where the byte means
#: nothing; bytes of the value besides; values inside; values inside for each of the length, 0 where
#: the length counts bytes.
_LENGTH_BYTES, _VALUE_BYTES, _VALUES, _PER_LENGTH = range(4)
#: The kernel's state: position, and values left.
_AT, _LEFT = range(2)


def _table() -> NDArray[np.int64]:
    """Return the layout of a value by its first byte, from the specification of MessagePack."""
    table = np.zeros((256, 4), dtype=np.int64)
    for low in range(16):
        table[0x80 + low, _VALUES], table[0x90 + low, _VALUES] = 2 * low, low
    table[0xA0:0xC0, _VALUE_BYTES] = np.arange(32)
    table[0xC1, _LENGTH_BYTES] = -1
    table[0xC4:0xC7, _LENGTH_BYTES] = 1, 2, 4  # bin
    table[0xC7:0xCA, _LENGTH_BYTES], table[0xC7:0xCA, _VALUE_BYTES] = (1, 2, 4), 1  # ext
    table[0xCA:0xCC, _VALUE_BYTES] = 4, 8  # float
    table[0xCC:0xD0, _VALUE_BYTES] = table[0xD0:0xD4, _VALUE_BYTES] = 1, 2, 4, 8  # uint, int
    table[0xD4:0xD9, _VALUE_BYTES] = 2, 3, 5, 9, 17  # fixext
    table[0xD9:0xDC, _LENGTH_BYTES] = 1, 2, 4  # str
    table[0xDC:0xDE, _LENGTH_BYTES], table[0xDC:0xDE, _PER_LENGTH] = (2, 4), 1  # array
    table[0xDE:0xE0, _LENGTH_BYTES], table[0xDE:0xE0, _PER_LENGTH] = (2, 4), 2  # map
    return table


_TABLE = _table()


@kernel
def _skip(
    data: NDArray[np.uint8], table: NDArray[np.int64], state: NDArray[np.int64], max_values: int
) -> int:
    """Step over up to `max_values` values; return a fault, or 0.

    `state` has the position and how many values are left; what they contain counts too.
    """
    at, left, size = state[_AT], state[_LEFT], data.shape[0]
    while left > 0 and max_values > 0:
        if left > size - at:  # each value has a byte at least
            return 1
        byte = data[at]
        at += 1
        left -= 1
        max_values -= 1
        if byte < 0x80 or byte >= 0xE0:  # a small integer, as most are
            continue
        width, body = table[byte, _LENGTH_BYTES], table[byte, _VALUE_BYTES]
        left += table[byte, _VALUES]
        if width:
            if width < 0:
                return 2
            if width > size - at:
                return 1
            length = 0
            for _ in range(width):
                length = length * 256 + int(data[at])
                at += 1
            left += table[byte, _PER_LENGTH] * length
            if table[byte, _PER_LENGTH] == 0:
                body += length
        if body > size - at:
            return 1
        at += body
    state[_AT], state[_LEFT] = at, left
    return 0


class Walk:
    """Finds where the values of a payload begin and end."""

    def __init__(self, payload: bytes) -> None:
        self.payload = payload
        self._data = np.frombuffer(payload, dtype=np.uint8)
        self._state = np.zeros(2, dtype=np.int64)

    def skip(self, at: int, count: int) -> Generator[None, None, int]:
        """Step over `count` values; return where they end.

        Yields:
            None after each `STEP` values, so that others can run.

        Raises:
            MessagePackError: the payload ends before, or is no MessagePack.
        """
        state = self._state
        state[_AT], state[_LEFT] = at, count
        while True:
            if fault := _skip(self._data, _TABLE, state, STEP):
                raise MessagePackError(f"not MessagePack: {_FAULTS[fault]}")
            at, left = int(state[_AT]), int(state[_LEFT])
            if not left:
                return at
            yield None
            state[_AT], state[_LEFT] = at, left  # another walk may have run in between

    def array_head(self, at: int) -> tuple[int, int] | None:
        """Return how many items an array has and where they begin; None for another value."""
        return self._head(at, 0x90, 0xDC)

    def map_head(self, at: int) -> tuple[int, int] | None:
        """Return how many pairs a map has and where they begin; None for another value."""
        return self._head(at, 0x80, 0xDE)

    def _head(self, at: int, short: int, long: int) -> tuple[int, int] | None:
        if at >= len(self.payload):
            raise MessagePackError("not MessagePack: it is truncated")
        byte = self.payload[at]
        if byte & 0xF0 == short:
            return byte & 15, at + 1
        if byte not in (long, long + 1):
            return None
        end = at + (3 if byte == long else 5)
        if end > len(self.payload):
            raise MessagePackError("not MessagePack: it is truncated")
        return int.from_bytes(self.payload[at + 1 : end], "big"), end


def warm_up() -> None:
    """Compile and load the kernel."""
    for _ in Walk(b"\x91\x00").skip(0, 1):
        pass
