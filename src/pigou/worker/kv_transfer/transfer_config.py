"""Limits of KV transfer between workers: checked values, unknown keys refused."""

from __future__ import annotations

import msgspec

from pigou.config import ConfigError
from pigou.request import SECOND
from pigou.wire.names import WILD

_POSITIVE = ("lease", "timeout", "threads", "copy_threads", "max_pending", "max_connections")
#: Backends where nobody says, the preferred one first; and all that there are.
BACKENDS = ("shm", "tcp")
ALL_BACKENDS = ("nixl", *BACKENDS)


class TransferConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Limits of one worker's Sender and Receiver; all times in nanoseconds."""

    host: str = "127.0.0.1"  # address that the side channel binds to
    port: int = 0  # its port; 0 takes a free one
    advertise: str = ""  # address that receivers are told; empty for `host`
    backends: tuple[str, ...] = BACKENDS
    # how long offered blocks are kept for a receiver that shows no sign of life.
    lease: int = 30 * SECOND
    max_hold: int = 300 * SECOND  # longest time that blocks are kept, whatever a receiver does
    timeout: int = 5 * SECOND  # longest silence of a peer during a pull or a handshake
    threads: int = 2  # pulls that a Receiver runs at once
    copy_threads: int = 2  # threads that copy one large pull from shared memory
    max_pending: int = 1024  # pulls that may wait for a thread; one more is refused
    max_connections: int = 128  # receivers that a Sender serves at once; one more is turned away

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_hold < self.lease:
            raise ConfigError(f"max_hold is {self.max_hold}; it must be at least lease")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; give 0 (any free port) to 65535")
        if not self.backends or set(self.backends) - set(ALL_BACKENDS):
            known = ", ".join(ALL_BACKENDS)
            raise ConfigError(f"backends is {list(self.backends)}; give one or more of: {known}")
        if self.host in WILD and not self.advertise:
            raise ConfigError(
                f"host is {self.host!r}, which no receiver can connect to; also give `advertise`"
            )
