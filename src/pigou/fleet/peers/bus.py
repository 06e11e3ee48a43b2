"""The bus between gateways: an interface of four calls, and NATS behind it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from pigou.fleet.nats_address import NatsAddress
from pigou.fleet.nats_connection import connect_nats
from pigou.imports import require

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg

#: Seconds between two tries to connect again.
_RETRY_S = 0.5


class BusError(ConnectionError):
    """The bus cannot be reached; the text says where."""


class PeerBus(Protocol):
    """Brings each message to all other gateways that are connected; it may lose some."""

    @property
    def connected(self) -> bool:
        """Whether messages go out now."""
        ...

    @property
    def closed(self) -> bool:
        """Whether `connect` is to be called: before the first time, or after a server's error."""
        ...

    async def connect(self, take: Callable[[bytes], None], again: Callable[[], None]) -> None:
        """Connect; then reconnect by itself after failures.

        Raises:
            BusError: it cannot be reached.
        """
        ...

    async def publish(self, topic: str, data: bytes) -> None:
        """Send a message to all; `topic` is for those who watch the bus."""
        ...

    async def close(self) -> None:
        """Send what is waiting, and end the connection."""
        ...


class NatsBus:
    """Core NATS: subjects `SUBJECT.gateways.GATEWAY.SEQ`, without JetStream."""

    def __init__(self, address: NatsAddress, subject: str) -> None:
        """Prepare.

        Args:
            subject: first part of the subjects.

        Raises:
            ConfigError: the extra `nats` is not installed.
        """
        require("nats", "--peers nats://")
        self._address, self._subject = address, f"{subject}.gateways"
        self._client: Client | None = None

    @property
    def connected(self) -> bool:
        """Whether messages go out now."""
        return self._client is not None and self._client.is_connected

    @property
    def closed(self) -> bool:
        """Whether there is no connection, and none is tried."""
        return self._client is None or self._client.is_closed

    async def connect(self, take: Callable[[bytes], None], again: Callable[[], None]) -> None:
        """As of `PeerBus`."""
        from nats.errors import Error

        async def reconnected() -> None:
            again()

        async def received(message: Msg) -> None:
            take(message.data)

        try:
            self._client = await connect_nats(
                self._address, _RETRY_S, reconnected=reconnected, echo=False
            )
            await self._client.subscribe(f"{self._subject}.>", cb=received)
            await self._client.flush(timeout=2)  # the server knows of it from now on
        except (OSError, Error, TimeoutError) as error:
            await self.close()
            raise BusError(f"{self._address}: {error or type(error).__name__}") from error

    async def publish(self, topic: str, data: bytes) -> None:
        """As of `PeerBus`."""
        if self._client is not None and self._client.is_connected:
            await self._client.publish(f"{self._subject}.{topic}", data)

    async def close(self) -> None:
        """As of `PeerBus`."""
        client, self._client = self._client, None
        if client is not None:
            with suppress(Exception):
                if client.is_connected:
                    await client.flush(timeout=1)
                await client.close()
