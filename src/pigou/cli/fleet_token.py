"""The fleet's token, for commands that ask a worker directly."""

from __future__ import annotations

import asyncio


def fleet_token(url: str) -> str:
    """Return what a worker of one's own fleet must be sent; empty for any other server.

    The secret is that of PIGOU_FLEET_SECRET, with which `pigou worker` starts from the same shell.
    A server is sent a token only once it has proved that it knows the secret.

    Args:
        url: of the server, without `/v1`.

    Raises:
        ConfigError: the variable holds no secret.
    """
    from pigou.wire.fleet_secret import FleetSecret

    secret = FleetSecret.given()
    if secret is None:
        return ""
    from pigou.fleet.probe import fleet_key

    return asyncio.run(fleet_key(url, secret))
