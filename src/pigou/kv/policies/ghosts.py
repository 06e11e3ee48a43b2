"""Ghosts: keys of blocks that were evicted, up to so many bytes of what they had."""

from __future__ import annotations

from collections import OrderedDict


class Ghosts:
    """Evicted keys, the oldest of which are forgotten. Falsy where there are none."""

    def __init__(self, cap_bytes: int) -> None:
        self.cap_bytes = cap_bytes
        self.bytes = 0
        self._sizes: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, key: bytes) -> bool:
        return key in self._sizes

    def add(self, key: bytes, size: int) -> None:
        """Remember a block of `size` bytes as the youngest."""
        self.pop(key)
        self._sizes[key] = size
        self.bytes += size
        while self.bytes > self.cap_bytes:
            self.forget()

    def pop(self, key: bytes) -> int:
        """Forget a block; returns its size, 0 if it was not remembered."""
        size = self._sizes.pop(key, 0)
        self.bytes -= size
        return size

    def forget(self) -> None:
        """Forget the oldest."""
        _, size = self._sizes.popitem(last=False)
        self.bytes -= size
