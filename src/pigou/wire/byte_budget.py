"""One memory budget for what other processes send: replies, pages and bodies under way, in sum.

Each holder may grow up to half of what the others leave (dynamic thresholds, by which switches
share a packet buffer: Choudhury and Hahne, 1998). So there is always room for one more: n holders
that grow without end get `limit / (n + 1)` bytes each, and as much stays free.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

import aiohttp

#: Bytes that a holder may have however full the budget is, so that small replies are served.
FREE_BYTES = 64 * 1024
_SHARE = 0.5
#: Bytes of a page that a worker shows of itself, and of a list that an API server answers with.
MAX_PAGE_BYTES, MAX_LIST_BYTES = 2**23, 2**26


class OverBudget(Exception):
    """A holder wants more than its share of the budget."""


class ByteBudget:
    """Bytes in memory, for all holders in one process.

    Example:
        with REPLIES.reserve() as held:
            held.grow(len(part))
    """

    def __init__(self, limit: int) -> None:
        """Begin empty; `limit` is in bytes."""
        self.limit = limit
        self.used = 0

    def reserve(self) -> ByteReservation:
        """Return a reservation of nothing yet."""
        return ByteReservation(self)


class ByteReservation:
    """What one reply, page or body holds; a context manager that gives it back."""

    __slots__ = ("_budget", "size")

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self.size = 0

    def check(self, size: int) -> None:
        """Raise `OverBudget` unless it may grow by `size` bytes."""
        budget, wanted = self._budget, self.size + size
        free = budget.limit - budget.used
        if wanted > FREE_BYTES and (size > free or wanted > _SHARE * (free + self.size)):
            raise OverBudget(
                f"{wanted} bytes of one, while {budget.used} of {budget.limit} are in use"
            )

    def grow(self, size: int) -> None:
        """Take `size` bytes more.

        Raises:
            OverBudget: more than its share; nothing was taken.
        """
        self.check(size)
        self.size += size
        self._budget.used += size

    def shrink(self, size: int) -> None:
        """Give `size` bytes back, as far as it holds them."""
        size = min(size, self.size)
        self.size -= size
        self._budget.used -= size

    def close(self) -> None:
        """Give everything back."""
        self.shrink(self.size)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


#: Replies, events and pages of workers and other servers that this process holds.
REPLIES = ByteBudget(256 * 2**20)
#: Bodies of requests that this process holds.
BODIES = ByteBudget(512 * 2**20)


async def read_page(response: aiohttp.ClientResponse, max_bytes: int = MAX_PAGE_BYTES) -> bytes:
    """Return the body of a page that another process shows.

    Raises:
        aiohttp.ClientPayloadError: it has more than `max_bytes` bytes, or all replies and pages
            under way more than their budget.
    """
    page, why = bytearray(), ""
    with REPLIES.reserve() as held:
        if (response.content_length or 0) > max_bytes:
            why = f"over {max_bytes} bytes"
        while not why and (part := await response.content.readany()):
            page += part
            try:
                held.grow(len(part))
            except OverBudget as error:
                why = str(error)
            if len(page) > max_bytes:
                why = f"over {max_bytes} bytes"
    if why:
        page.clear()
        response.close()
        raise aiohttp.ClientPayloadError(f"{response.url.path}: {why}")
    return bytes(page)
