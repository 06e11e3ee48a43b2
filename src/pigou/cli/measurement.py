"""What `pigou bench` and `pigou profile` share: the token of the fleet, and a stop."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress


def fleet_token(url: str) -> str:
    """Return the token that a worker of this fleet must be sent; empty for any other server.

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


def stop_on_signals() -> asyncio.Event:
    """Return an event that Ctrl-C or SIGTERM sets; call it within the event loop.

    Where signals have no handlers (a platform without them, or not the main thread), nothing
    sets it.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    with suppress(NotImplementedError, ValueError, RuntimeError):
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
    return stop
