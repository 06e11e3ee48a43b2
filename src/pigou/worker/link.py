"""A link between workers that sleep: blocks move at once, and count as there when it says so."""

from __future__ import annotations

import heapq
import logging
import math
import threading
import time
from collections.abc import Callable

from pigou.request import SECOND
from pigou.sim.network import LinkConfig

_log = logging.getLogger(__name__)


class Link:
    """What a worker receives by: one load after another, each after the link's latency.

    Only the receiver's end is shared: `LinkConfig` with `sharing` fifo and `ends` receiver. A
    sender of several receivers is not slowed by them.
    """

    def __init__(self, config: LinkConfig, block_bytes: int) -> None:
        """Start with an idle link; blocks of `block_bytes` bytes come over it."""
        self._nanos_per_block = block_bytes * config.nanos_per_byte
        self._latency = round(config.latency_us * 1000)
        self._free = 0
        self._due: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0
        self._change = threading.Condition()
        self._closed = False
        threading.Thread(target=self._run, name="link", daemon=True).start()

    def send(self, blocks: int, now: int) -> int:
        """Return when the last of so many blocks arrives, in monotonic nanoseconds."""
        with self._change:
            self._free = max(now, self._free) + math.ceil(blocks * self._nanos_per_block)
            return self._free + self._latency

    def at(self, when: int, action: Callable[[], None]) -> None:
        """Let `action` run at that time, or now if that is past, on the link's thread."""
        with self._change:
            self._count += 1
            heapq.heappush(self._due, (when, self._count, action))
            self._change.notify()

    def close(self) -> None:
        """End the thread; what is still on the way arrives at once."""
        with self._change:
            self._closed = True
            self._change.notify()

    def _run(self) -> None:
        while (action := self._next()) is not None:
            try:
                action()
            except Exception:
                _log.exception("an arrival could not be told")

    def _next(self) -> Callable[[], None] | None:
        """Wait for the next arrival; None when the link is closed and empty."""
        with self._change:
            while True:
                left = self._due[0][0] - time.monotonic_ns() if self._due else None
                if left is not None and (left <= 0 or self._closed):
                    return heapq.heappop(self._due)[2]
                if self._closed:
                    return None
                self._change.wait(None if left is None else left / SECOND)
