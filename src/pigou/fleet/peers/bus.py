"""The bus between gateways: its options, an interface of four calls, and NATS behind it."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Protocol

import msgspec

from pigou.config import ConfigError, option
from pigou.fleet.nats_connection import NatsAddress, connect_nats
from pigou.registry import require

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg

_SUBJECT = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_GROUP = "Peers"
#: Seconds between reconnects.
_RETRY_S = 0.5


class PeersConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Bus of the gateways, and its subjects."""

    peers: Annotated[
        str,
        option(
            "Bus on which the gateways of one fleet share what they route: nats://HOST:PORT"
            "[,nats://..], or tls://. All need the same fleet secret.",
            _GROUP,
        ),
    ] = ""
    subject: Annotated[
        str, option("Prefix of the fleet's subjects on the bus.", _GROUP, name="peers_subject")
    ] = "pigou"

    def __post_init__(self) -> None:
        if self.peers:
            self.address()
        if not _SUBJECT.fullmatch(self.subject):
            raise ConfigError(
                f"subject is {self.subject!r}; it must be letters, digits, - and _, in parts with "
                "dots between"
            )

    def address(self) -> NatsAddress:
        """Return the address of the servers, where there are any. Raises ConfigError."""
        urls = [url.strip() for url in self.peers.split(",") if url.strip()]
        return NatsAddress.parse(urls, "peers")


class BusError(ConnectionError):
    """The bus cannot be reached; the text says where."""


class PeerBus(Protocol):
    """Best-effort broadcast to all other gateways."""

    @property
    def connected(self) -> bool:
        """Whether messages go out now."""
        ...

    @property
    def closed(self) -> bool:
        """Whether `connect` is to be called: before the first time, or after a server's error."""
        ...

    async def connect(self, take: Callable[[bytes], None], again: Callable[[], None]) -> None:
        """Connect; then reconnect by itself after failures. Raises BusError."""
        ...

    async def publish(self, topic: str, data: bytes) -> None:
        """Send a message to all; `topic` is for those who watch the bus."""
        ...

    async def close(self) -> None:
        """Flush and close."""
        ...


class NatsBus:
    """Core NATS: subjects `SUBJECT.gateways.GATEWAY.SEQ`, without JetStream."""

    def __init__(self, address: NatsAddress, subject: str) -> None:
        """Subjects begin with `subject`. Raises ConfigError: the extra `nats` is not installed."""
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
        """See `PeerBus`."""
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
        """See `PeerBus`."""
        if self._client is not None and self._client.is_connected:
            await self._client.publish(f"{self._subject}.{topic}", data)

    async def close(self) -> None:
        """See `PeerBus`."""
        client, self._client = self._client, None
        if client is not None:
            with suppress(Exception):
                if client.is_connected:
                    await client.flush(timeout=1)
                await client.close()
