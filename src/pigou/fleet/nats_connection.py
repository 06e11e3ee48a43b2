"""Connections to NATS that are made again by themselves, and addresses without passwords."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nats.aio.client import Client

#: Seconds for a connection, and between two pings, of which two may stay without answer.
_CONNECT_S, _PING_S, _PINGS = 2, 2, 2


async def connect_nats(
    servers: str | Sequence[str],
    retry_s: float,
    *,
    reconnected: Callable[[], Awaitable[None]] | None = None,
    echo: bool = True,
) -> Client:
    """Connect to NATS; a connection that is lost is made again without end.

    Args:
        servers: addresses, `nats://` or `tls://`.
        retry_s: seconds between two tries.
        reconnected: called when a lost connection is there again.
        echo: whether the connection gets messages that it published itself.

    Raises:
        nats.errors.Error, OSError, TimeoutError: nobody answers.
    """
    import nats

    return await nats.connect(
        servers if isinstance(servers, str) else list(servers),
        connect_timeout=_CONNECT_S,
        ping_interval=_PING_S,
        max_outstanding_pings=_PINGS,
        reconnect_time_wait=retry_s,
        max_reconnect_attempts=-1,
        allow_reconnect=True,
        no_echo=not echo,
        error_cb=_ignore,
        reconnected_cb=reconnected,
    )


async def _ignore(_: Exception) -> None:
    """Lost connections are made again; calls that fail say it themselves."""


def public_address(url: str) -> str:
    """Return an address without user and password, for messages and logs."""
    address, mark, query = url.partition("?")
    scheme, separator, rest = address.rpartition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}{mark}{query}"
