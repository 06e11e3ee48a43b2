"""Configuration of the gateway: checked values, unknown keys refused."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path

import msgspec

from pigou.config import ConfigError
from pigou.wire.unknown_fields import MODES

#: Addresses that only this machine reaches.
_LOOPBACK_NAMES = ("localhost",)
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s,]+")
#: Endings of files that are unpacked when they are read.
_PACKED = (".gz", ".zst")


class GatewayConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Limits of one gateway.

    Attributes:
        host: address to listen on.
        port: TCP port; 0 takes a free one.
        max_body: most bytes of a request's body; more is answered 413.
        max_line: most bytes of the request line; more is answered 431.
        max_header: most bytes of one header; more is answered 431.
        max_headers: most headers; more is answered 431.
        max_connections: client connections at once; 0 takes what the limit of open files allows.
            A new one takes the place of one that has no request under way.
        max_peer_connections: the same for one address; 0 for no limit.
        head_timeout: seconds in which a request's head must have come.
        keepalive: seconds for which an idle connection is kept.
        cors_origins: origins whose pages may use this gateway from a browser; `*` for all.
        allowed_hosts: names by which a gateway on a loopback address may be called, besides
            loopback ones; elsewhere, the only ones, if there are any.
        api_keys_file: hashed keys; without it, whoever reaches the port is served.
        open_metrics: let scrapers without a key read `/metrics`, without what names tenants.
        allow_open: listen beyond loopback although there are no keys.
        journal: file to which all that decisions depend on is appended, plain; None writes none.
        release: manifest of what is released together with the fleet (prompts, policies,
            applications): another one voids all that is cached; empty for none.
        client_timeout: seconds that a client may take nothing of its stream while bytes wait for
            it; then it is cut off. 0 waits for ever.
        strict: judge the fields of request bodies here; off in front of stock workers, which
            know fields that Pigou does not.
        allow_special_tokens: let special tokens that clients type in chats become control tokens.
        unknown_fields: what is done with unknown fields where they are judged here: "warn", once
            in the log and in a header of each reply, or "refuse".
    """

    host: str = "127.0.0.1"
    port: int = 8000
    max_body: int = 16 * 1024 * 1024
    max_line: int = 8190
    max_header: int = 8190
    max_headers: int = 100
    max_connections: int = 0
    max_peer_connections: int = 0
    head_timeout: float = 15.0
    keepalive: float = 120.0
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    api_keys_file: str | None = None
    open_metrics: bool = False
    allow_open: bool = False
    journal: str | None = None
    release: str = ""
    client_timeout: float = 60.0
    strict: bool = True
    allow_special_tokens: bool = False
    unknown_fields: str = "warn"

    def __post_init__(self) -> None:
        """Refuse values that are out of range, and an open door that nobody asked for."""
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; it must be in [0, 65535]")
        for name in ("max_body", "max_line", "max_header", "max_headers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not 0 <= self.client_timeout < float("inf"):
            raise ConfigError(
                f"client_timeout is {self.client_timeout}; it must be 0 or more seconds"
            )
        if self.unknown_fields not in MODES:
            raise ConfigError(
                f"unknown_fields is {self.unknown_fields!r}; it must be {' or '.join(MODES)}"
            )
        self._check_connections()
        if self.journal is not None and (packing := Path(self.journal).suffix) in _PACKED:
            raise ConfigError(
                f"journal is {self.journal!r}, and journals are written plain; leave {packing} "
                "away, and pack the file afterwards"
            )
        if not is_loopback(self.host) and self.api_keys_file is None and not self.allow_open:
            raise ConfigError(
                f"host is {self.host!r}, which other machines reach, and there are no API keys; "
                "give --api-keys-file FILE, or --allow-open if the network is trusted"
            )

    def _check_connections(self) -> None:
        """Refuse limits of connections that are out of range, and origins that are none."""
        for name in ("max_connections", "max_peer_connections"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 0")
        for name in ("head_timeout", "keepalive"):
            if not 0 < getattr(self, name) <= 86_400:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be in (0, 86400]")
        for origin in self.cors_origins:
            if origin not in ("*", "null") and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"cors_origins has {origin!r}; an origin is SCHEME://HOST[:PORT], without a "
                    "path, or *"
                )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    if host in _LOOPBACK_NAMES:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
