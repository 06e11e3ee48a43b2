"""Connections to NATS: over TLS where that is asked for, and made again by themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from pigou.fleet.nats_address import NatsAddress

if TYPE_CHECKING:
    from nats.aio.client import Client

#: Seconds for a connection, and between two pings, of which two may stay without answer.
_CONNECT_S, _PING_S, _PINGS = 2, 2, 2
#: Seconds for the end of a connection that was not made.
_CLOSE_S = 0.2


async def connect_nats(
    address: NatsAddress,
    retry_s: float | None,
    *,
    reconnected: Callable[[], Awaitable[None]] | None = None,
    closed: Callable[[], Awaitable[None]] | None = None,
    echo: bool = True,
) -> Client:
    """Connect to NATS within 2 s; a connection that is lost later is made again without end.

    A server's error, such as too many connections, closes the client: its owner makes another.

    Args:
        retry_s: seconds between two tries; None for a connection that is not made again.
        closed: called when the connection is closed, or lost and not made again.
        echo: whether the connection gets messages that it published itself.

    Raises:
        nats.errors.Error, OSError, TimeoutError: nobody answers, the certificate is not trusted,
            or the server refuses the login.
    """
    client = _client(address)
    try:
        async with asyncio.timeout(_CONNECT_S):  # of its own it tries for minutes
            await client.connect(
                list(address.urls), connect_timeout=_CONNECT_S, allow_reconnect=False,
                max_reconnect_attempts=1, reconnect_time_wait=0, no_echo=not echo,
                ping_interval=_PING_S, max_outstanding_pings=_PINGS, error_cb=_ignore,
                reconnected_cb=reconnected, closed_cb=closed, **address.login(),
            )  # fmt: skip
    except BaseException:
        with suppress(Exception):  # after a failed handshake it may never end
            await asyncio.wait_for(client.close(), _CLOSE_S)
        raise
    if retry_s is not None:
        client.options.update(
            allow_reconnect=True, max_reconnect_attempts=-1, reconnect_time_wait=retry_s
        )
    return client


def _client(address: NatsAddress) -> Client:
    from nats.aio.client import Client
    from nats.errors import SecureConnRequiredError

    class RepairedClient(Client):
        """Is closed by what nats-py does not foresee, instead of neither connected nor closed."""

        async def _attempt_reconnect(self) -> None:
            try:
                await super()._attempt_reconnect()
            except Exception as error:
                await self._error_cb(error)
                await self.close()

    class TlsClient(RepairedClient):
        """Tells nothing to a server that offers no TLS; nats-py would log in without it."""

        async def _process_info(self, info: dict[str, Any], *more: Any, **named: Any) -> None:
            if not info.get("tls_required"):
                raise SecureConnRequiredError
            await super()._process_info(info, *more, **named)

    return TlsClient() if address.is_tls else RepairedClient()


async def _ignore(_: Exception) -> None:
    """Lost connections are made again; calls that fail say it themselves."""
