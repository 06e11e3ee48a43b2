"""Addresses of a worker, as URLs have them."""

from __future__ import annotations

import ipaddress
import re
import socket

#: Hosts of a server that listens on all addresses.
WILD = ("", "0.0.0.0", "::")
_WILDCARD = re.compile(r"^tcp://(\*|0\.0\.0\.0|\[::\])(?=:)")


def advertised(listens: str, given: str = "") -> str:
    """Return the host at which others reach a server.

    Args:
        given: by the operator; empty for the host that it listens on, or for this machine's own
            address by its name where that is all of them; loopback where it has none.
    """
    if given or listens not in WILD:
        return given or listens
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


def url_host(host: str) -> str:
    """Return a host as it is written in a URL: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def reachable(endpoint: str, host: str) -> str:
    """Put the worker's host in place of a wildcard address (`tcp://*:5557`)."""
    return _WILDCARD.sub(f"tcp://{url_host(host)}", endpoint)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
