"""The address of NATS servers, with what a client proves itself by."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec

from pigou.config import ConfigError
from pigou.fleet.tls_files import TlsFiles


class NatsAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Servers of one NATS system: `nats://[USER:PASSWORD@|TOKEN@]HOST:PORT`, or `tls://`.

    Attributes:
        user, password: of the login; a user alone is a token.
    """

    urls: tuple[str, ...]
    user: str = ""
    password: str = ""
    tls: TlsFiles = TlsFiles()

    @classmethod
    def parse(cls, urls: Iterable[str], what: str) -> NatsAddress:
        """Read URLs; a login, and `?ca=FILE&cert=FILE&key=FILE`, of one of them holds for all.

        Args:
            urls: with `nats://` or `tls://`.
            what: option that has them, for messages.

        Raises:
            ConfigError: one is none of NATS, has an unknown parameter, or cannot be honoured.
        """
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
        """Whether servers that offer no TLS are refused."""
        return self.urls[0].startswith("tls://")

    def login(self) -> dict[str, Any]:
        """Return what NATS's client is to prove itself by, as its options."""
        options: dict[str, Any] = {"tls": self.tls.context()} if self.is_tls else {}
        if self.password:
            return options | {"user": self.user, "password": self.password}
        return options | ({"token": self.user} if self.user else {})

    def __str__(self) -> str:
        """Return the servers, without passwords."""
        return ", ".join(self.urls)


def public_address(url: str) -> str:
    """Return an address without user and password, for messages and logs."""
    address, mark, query = url.partition("?")
    scheme, separator, rest = address.rpartition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}{mark}{query}"
