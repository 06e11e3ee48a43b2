"""NATS servers: their address, login and TLS, and connections that come back by themselves."""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec

from pigou.config import ConfigError
from pigou.request import SECOND

if TYPE_CHECKING:
    from nats.aio.client import Client

#: Seconds for a connection, and between two pings, of which two may stay without answer.
_CONNECT_S, _PING_S, _PINGS = 2, 2, 2
#: Seconds for the end of a connection that was not made.
_CLOSE_S = 0.2


class TlsFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Paths of PEM files; empty for none."""

    ca: str = ""  # certificates that are trusted, in place of the system's
    cert: str = ""  # certificate of the client
    key: str = ""

    @classmethod
    def parse(cls, files: Mapping[str, str], what: str) -> TlsFiles:
        """Parse a URL's parameters of option `what`; raises ConfigError."""
        unknown = set(files) - set(cls.__struct_fields__)
        if unknown:
            names = ", ".join(cls.__struct_fields__)
            raise ConfigError(
                f"{what} has the parameter {min(unknown)!r}; of the connection there are {names}"
            )
        tls = cls(**files)
        if bool(tls.cert) != bool(tls.key):
            raise ConfigError(f"{what} has one of cert and key; give both, or none")
        try:
            tls.context()
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"{what}: ca, cert or key is no readable PEM file: {error}"
            ) from error
        return tls

    def context(self) -> ssl.SSLContext:
        """Return an SSL context that verifies servers and presents the client certificate."""
        context = ssl.create_default_context(cafile=self.ca or None)
        if self.cert:
            context.load_cert_chain(self.cert, self.key)
        return context


class NatsAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Servers of one NATS system: `nats://[USER:PASSWORD@|TOKEN@]HOST:PORT`, or `tls://`."""

    urls: tuple[str, ...]
    user: str = ""  # alone, it is a token
    password: str = ""
    tls: TlsFiles = TlsFiles()

    @classmethod
    def parse(cls, urls: Iterable[str], what: str) -> NatsAddress:
        """Read URLs of option `what`; a login, and `?ca=FILE&cert=FILE&key=FILE`, hold for all."""
        servers: list[str] = []
        files: dict[str, str] = {}
        schemes: set[str] = set()
        logins: set[tuple[str, str]] = set()
        for url in urls:
            parts = urlsplit(url)
            if parts.scheme not in ("nats", "tls") or not parts.hostname:
                raise ConfigError(
                    f"{what} has {public_address(url)!r}; write nats://HOST:PORT, or tls://"
                )
            files |= dict(parse_qsl(parts.query, keep_blank_values=True))
            schemes.add(parts.scheme)
            servers.append(f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}")
            if parts.username:
                logins.add((unquote(parts.username), unquote(parts.password or "")))
        if len(logins) > 1:
            raise ConfigError(f"{what} has several logins; give one for all servers")
        if len(schemes) > 1:
            raise ConfigError(f"{what} has nats:// and tls://; write tls:// for all servers")
        tls = TlsFiles.parse(files, what)
        if tls != TlsFiles() and "tls" not in schemes:
            raise ConfigError(f"{what} has {', '.join(files)} without TLS; write tls://")
        user, password = next(iter(logins), ("", ""))
        return cls(urls=tuple(servers), user=user, password=password, tls=tls)

    @property
    def is_tls(self) -> bool:
        """True if TLS is required."""
        return self.urls[0].startswith("tls://")

    def login(self) -> dict[str, Any]:
        """Return the NATS client's login options."""
        options: dict[str, Any] = {"tls": self.tls.context()} if self.is_tls else {}
        if self.password:
            return options | {"user": self.user, "password": self.password}
        return options | ({"token": self.user} if self.user else {})

    def __str__(self) -> str:
        return ", ".join(self.urls)


def public_address(url: str) -> str:
    """Return an address without user and password, for messages and logs."""
    address, mark, query = url.partition("?")
    scheme, separator, rest = address.rpartition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}{mark}{query}"


async def connect_nats(
    address: NatsAddress,
    retry_s: float | None,
    *,
    reconnected: Callable[[], Awaitable[None]] | None = None,
    closed: Callable[[], Awaitable[None]] | None = None,
    echo: bool = True,
) -> Client:
    """Connect to NATS within 2 s; reconnect every `retry_s` seconds without end (None: never).

    A server error, such as too many connections, closes the client (`closed`). `echo` also delivers
    own messages. Raises nats.errors.Error, OSError or TimeoutError.
    """
    client = _client(address)
    try:
        async with asyncio.timeout(_CONNECT_S):  # without a limit it tries for minutes
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
        """Closes on errors that nats-py leaves half open."""

        async def _attempt_reconnect(self) -> None:
            try:
                await super()._attempt_reconnect()
            except Exception as error:
                await self._error_cb(error)
                await self.close()

    class TlsClient(RepairedClient):
        """Refuses to log in without TLS; nats-py would."""

        async def _process_info(self, info: dict[str, Any], *more: Any, **named: Any) -> None:
            if not info.get("tls_required"):
                raise SecureConnRequiredError
            await super()._process_info(info, *more, **named)

    return TlsClient() if address.is_tls else RepairedClient()


async def _ignore(_: Exception) -> None:
    """Lost connections are made again; calls that fail say it themselves."""


class ReconnectBackoff(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds between tries, doubled by each failure; `jitter` spreads workers after an outage."""

    min_s: Annotated[float, msgspec.Meta(gt=0)] = 0.5
    max_s: Annotated[float, msgspec.Meta(gt=0)] = 5.0
    jitter: Annotated[float, msgspec.Meta(ge=0)] = 0.5

    def wait_ns(self, failures: int, rng: random.Random) -> int:
        """Return the backoff in ns after `failures` >= 1 in a row."""
        wait_s = min(self.min_s * 2.0 ** min(failures - 1, 30), self.max_s)
        return round(wait_s * (1 + self.jitter * rng.random()) * SECOND)
