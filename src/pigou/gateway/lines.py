"""The lines to one worker: kept open for a while, opened when there is none."""

from __future__ import annotations

import asyncio
import ssl
from urllib.parse import urlsplit

from pigou.gateway.line import Head, Line, LineError
from pigou.wire.fleet_secret import TENANT

#: Below the 5 seconds after which vLLM's server closes idle connections: a request that is sent
#: on a connection at the moment it closes is lost.
KEEPALIVE_S = 4.0
CONNECT_S = 5.0


class Lines:
    """A pool without a limit."""

    def __init__(self, url: str, headers: dict[str, str]) -> None:
        """Prepare; `headers` go with every request."""
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._prefix = parts.path.encode()
        fixed = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._fixed = f"host: {parts.netloc}\r\n{fixed}".encode()
        self._idle: list[Line] = []
        self._used: set[Line] = set()
        self._closed = False

    async def ask(
        self, path: str, body: bytes, request_id: str, tenant: str = ""
    ) -> tuple[Line, Head]:
        """Post a body; return the line, whose body is to be read, and the head of the answer.

        Args:
            path: of the worker's own URL.
            body: as JSON.
            request_id: of the client's request.
            tenant: mark of whose it is; empty to tell none.

        A kept line that turns out to be closed is replaced once: nothing of the request was
        answered, the server had ended the connection before.

        Raises:
            LineError, OSError, TimeoutError: no connection, or no answer.
        """
        own = f"x-request-id: {request_id}\r\ncontent-length: {len(body)}\r\n"
        if tenant:
            own += f"{TENANT}: {tenant}\r\n"
        request = b"POST %b%b HTTP/1.1\r\n%b%b\r\n%b" % (
            self._prefix, path.encode(), self._fixed, own.encode(), body,
        )  # fmt: skip
        kept = self._kept()
        if kept is not None:
            try:
                return kept, await self._send(kept, request)
            except LineError as error:
                if not error.fresh:
                    raise
        try:
            line = await self._open()
        except (OSError, TimeoutError) as error:
            if kept is None:
                raise
            raise LineError(f"it ended with the request: {error}", fresh=True) from error
        return line, await self._send(line, request)

    def give_back(self, line: Line) -> None:
        """Keep a line for the next request; cut one whose answer was not read to its end."""
        self._used.discard(line)
        if line.idle and not self._closed:
            line.idle_since = asyncio.get_running_loop().time()
            self._idle.append(line)
        else:
            line.abort()

    def close(self) -> None:
        """Cut all lines: whoever reads one gets an error."""
        self._closed = True
        for line in [*self._idle, *self._used]:
            line.abort()
        self._idle.clear()

    def _kept(self) -> Line | None:
        oldest = asyncio.get_running_loop().time() - KEEPALIVE_S
        while self._idle:
            line = self._idle.pop()
            if line.idle and line.idle_since > oldest:
                return line
            line.abort()
        return None

    async def _open(self) -> Line:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_S):
            _, line = await loop.create_connection(Line, self._host, self._port, ssl=self._tls)
        return line

    async def _send(self, line: Line, request: bytes) -> Head:
        if self._closed:
            line.abort()
            raise LineError("the worker was left", fresh=False)
        self._used.add(line)
        try:
            return await line.ask(request)
        except BaseException:
            self.give_back(line)
            raise
