"""Refuses a port that is taken, before anything else is started."""

from __future__ import annotations

import errno
import socket

from pigou.config import ConfigError


def check_port(host: str, port: int) -> None:
    """Refuse `--port` where another process listens; 0, and hosts without an address, pass.

    Raises:
        ConfigError: the port is taken, or may not be used.
    """
    if not 0 < port < 2**16:
        return  # 0 takes a free one; others are refused with the rest of the configuration
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise ConfigError(f"--host is {host!r}, and has no address: {error}") from None
    for family, kind, protocol, _, address in found:
        try:
            probe = socket.socket(family, kind, protocol)
        except OSError:
            continue  # the machine has no such addresses
        with probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
                probe.listen(1)
            except OSError as error:
                raise ConfigError(_reason(host, port, error)) from None


def _reason(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"--port is {port}, and another process listens there; give another --port, or 0 for "
            "a free one"
        )
    if error.errno == errno.EACCES:
        return f"--port is {port}, and this user may not listen there; give one above 1023"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--host is {host!r}, and is no address of this machine"
    return f"--port is {port}, and cannot be listened at: {error.strerror}"
