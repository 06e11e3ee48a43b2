"""Addresses of a worker, as URLs have them."""

from __future__ import annotations

import re

_WILDCARD = re.compile(r"^tcp://(\*|0\.0\.0\.0|\[::\])(?=:)")


def url_host(host: str) -> str:
    """Return a host as it is written in a URL: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def reachable(endpoint: str, host: str) -> str:
    """Put the worker's host in place of a wildcard address (`tcp://*:5557`)."""
    return _WILDCARD.sub(f"tcp://{url_host(host)}", endpoint)
