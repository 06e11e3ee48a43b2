"""Configuration of a fleet: its workers, and how closely they are watched."""

from __future__ import annotations

from typing import Self
from urllib.parse import urlsplit

import msgspec

from pigou.config import ConfigError
from pigou.request import Role


class WatchConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How closely workers are watched; all in seconds.

    Attributes:
        every: between two looks at a worker.
        timeout: that a look waits for `/health`.
        failures: looks in a row that may be refused before a worker counts as down.
        hang: that an engine with work may make no progress, by its own account, or that a worker
            may answer nothing; 10 ms more for each token that it computes. 0 for ever.
        start: that a worker may take to become ready.
        drain: that requests under way are given when the fleet ends.
        min_backoff_s: before the first restart; doubled by each further one.
        max_backoff_s: at which the doubling ends.
    """

    every: float = 1.0
    timeout: float = 3.0
    failures: int = 3
    hang: float = 60.0
    start: float = 600.0
    drain: float = 30.0
    min_backoff_s: float = 0.25
    max_backoff_s: float = 30.0

    def __post_init__(self) -> None:
        """Refuse values that would watch nobody."""
        for name in ("every", "timeout", "start", "min_backoff_s", "max_backoff_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be above 0 seconds")
        for name in ("hang", "drain"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 0")
        if self.failures < 1:
            raise ConfigError(f"failures is {self.failures}; it must be at least 1")


class LocalWorker(msgspec.Struct, frozen=True, kw_only=True):
    """A worker process to start.

    Attributes:
        id: name in the fleet.
        role: what it is asked to do.
        arguments: of `pigou worker`, besides role, address and port.
    """

    id: str
    role: Role
    arguments: tuple[str, ...] = ()


class AttachedWorker(msgspec.Struct, frozen=True, kw_only=True):
    """A server that somebody else runs.

    Attributes:
        id: name in the fleet.
        url: base address, without a trailing slash.
        role: what it is asked to do.
        events: ZMQ address of its KV events; empty asks the server.
        replay: ZMQ address where past events can be asked for; empty asks the server.
        topic: of the events; every topic when empty.
        key: sent as bearer key.
        pin: of a frontend of NVIDIA Dynamo, the id of the one worker behind it that is meant.
    """

    id: str
    url: str
    role: Role = Role.BOTH
    events: str = ""
    replay: str = ""
    topic: str = ""
    key: str = ""
    pin: str = ""

    @classmethod
    def parse(cls, text: str, number: int) -> Self:
        """Read `URL[,role=R][,events=ZMQ][,replay=ZMQ][,topic=T][,key=K][,pin=ID]`.

        Raises:
            ConfigError: the URL or an option is not understood.
        """
        url, *rest = text.split(",")
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise ConfigError(f"attach: {url!r} is no base URL; write for example http://HOST:8000")
        options = {}
        for item in rest:
            name, equals, value = item.partition("=")
            if name not in ("role", "events", "replay", "topic", "key", "pin") or not equals:
                raise ConfigError(
                    f"attach: {item!r} is not understood; after the URL come role=, events=, "
                    "replay=, topic=, key= or pin="
                )
            options[name] = value
        role = options.pop("role", Role.BOTH.value)
        if role not in list(Role):
            raise ConfigError(f"attach: role is {role!r}; it must be prefill, decode or both")
        url = url.rstrip("/").removesuffix("/v1")
        return cls(id=f"attached-{number}", url=url, role=Role(role), **options)


class FleetError(RuntimeError):
    """The fleet cannot be what was asked for; the message says why."""
