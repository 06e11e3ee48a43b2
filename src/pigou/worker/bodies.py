"""Request bodies of a worker: small ones are decoded at once, large ones on a thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from aiohttp import web

from pigou.wire.json_limits import SMALL, read_fields
from pigou.wire.openai_requests import without_bom
from pigou.wire.request_body import OffLoop, read_json
from pigou.worker.fleet_guard import fleet_tenant

_B = TypeVar("_B")
#: Large bodies of one tenant that may wait for a thread.
_MOST_WAITING = 1024


class Bodies:
    """Reads and decodes bodies within bounds."""

    def __init__(self, most: int, context: int) -> None:
        """Read bodies of at most `most` bytes, for a model that holds `context` tokens."""
        self._most = most
        self._context = context
        self._large = OffLoop(most_waiting=_MOST_WAITING)

    async def read(self, request: web.Request, decode: Callable[[bytes], _B]) -> _B:
        """Return what `decode` makes of a request's body, which must be declared as JSON.

        Raises:
            APIError: as `pigou.wire.request_body.read_json`; 400 for a body out of bounds. Whatever
                `decode` raises.
        """
        data = await read_json(request, self._most)
        if len(data) <= SMALL:
            return self._decode(data, decode)
        return await self._large.run(fleet_tenant(), lambda: self._decode(data, decode))

    def close(self) -> None:
        """End the threads."""
        self._large.close()

    def _decode(self, data: bytes, decode: Callable[[bytes], _B]) -> _B:
        data = without_bom(data)
        read_fields(data, self._context)
        return decode(data)
