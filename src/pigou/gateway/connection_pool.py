"""The pool of HTTP connections to one worker: kept alive for a while, opened on demand."""

from __future__ import annotations

import asyncio
import ssl
from urllib.parse import urlsplit

from pigou.gateway.http_connection import HTTPConnection, HTTPConnectionError
from pigou.gateway.http_parsing import ResponseHead
from pigou.wire.fleet_secret import TENANT

#: Below the 5 seconds after which vLLM's server closes idle connections: a request that is sent
#: on a connection at the moment it closes is lost.
KEEPALIVE_S = 4.0
CONNECT_S = 5.0


class HTTPConnectionPool:
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
        self._idle: list[HTTPConnection] = []
        self._used: set[HTTPConnection] = set()
        self._closed = False

    async def ask(
        self, path: str, body: bytes, request_id: str, tenant: str = "", trace: str = ""
    ) -> tuple[HTTPConnection, ResponseHead]:
        """Post a body; return the connection, to read the answer's body from, and its head.

        Args:
            path: of the worker's own URL.
            request_id: of the client's request.
            tenant: mark of whose it is; empty to tell none.
            trace: header lines of the trace that it belongs to, each with its line break.

        An idle connection that turns out to be closed is replaced once: nothing of the request was
        answered, the server had ended the connection before.

        Raises:
            HTTPConnectionError, OSError, TimeoutError: no connection, or no answer.
        """
        own = f"x-request-id: {request_id}\r\ncontent-length: {len(body)}\r\n{trace}"
        if tenant:
            own += f"{TENANT}: {tenant}\r\n"
        request = b"POST %b%b HTTP/1.1\r\n%b%b\r\n%b" % (
            self._prefix, path.encode(), self._fixed, own.encode(), body,
        )  # fmt: skip
        reused = self._take_idle()
        if reused is not None:
            try:
                return reused, await self._send(reused, request)
            except HTTPConnectionError as error:
                if not error.fresh:
                    raise
        try:
            connection = await self._open()
        except (OSError, TimeoutError) as error:
            if reused is None:
                raise
            raise HTTPConnectionError(f"it ended with the request: {error}", fresh=True) from error
        return connection, await self._send(connection, request)

    def give_back(self, connection: HTTPConnection) -> None:
        """Keep a connection for the next request; cut one whose answer was not read to its end."""
        self._used.discard(connection)
        if connection.idle and not self._closed:
            connection.idle_since = asyncio.get_running_loop().time()
            self._idle.append(connection)
        else:
            connection.abort()

    def close(self) -> None:
        """Cut all connections: their readers get an error."""
        self._closed = True
        for connection in [*self._idle, *self._used]:
            connection.abort()
        self._idle.clear()

    def _take_idle(self) -> HTTPConnection | None:
        oldest = asyncio.get_running_loop().time() - KEEPALIVE_S
        while self._idle:
            connection = self._idle.pop()
            if connection.idle and connection.idle_since > oldest:
                return connection
            connection.abort()
        return None

    async def _open(self) -> HTTPConnection:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_S):
            _, connection = await loop.create_connection(
                HTTPConnection, self._host, self._port, ssl=self._tls
            )
        return connection

    async def _send(self, connection: HTTPConnection, request: bytes) -> ResponseHead:
        if self._closed:
            connection.abort()
            raise HTTPConnectionError("the worker was left", fresh=False)
        self._used.add(connection)
        try:
            return await connection.ask(request)
        except BaseException:
            self.give_back(connection)
            raise
