"""What `pigou bench` and `pigou profile` share: the token of the fleet, and a stop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from pigou.stop_signals import StopSignals

#: Seconds that a measurement is given to end, and to write what it has.
_STOP_S = 60.0


def fleet_token(url: str) -> str:
    """Return the token that a worker of this fleet must be sent; empty for any other server.

    The secret is that of PIGOU_FLEET_SECRET, with which `pigou worker` starts from the same shell.
    A server is sent a token only once it has proved that it knows the secret.
    """
    from pigou.wire.fleet_secret import FleetSecret

    secret = FleetSecret.given()
    if secret is None:
        return ""
    from pigou.fleet.probe import fleet_key

    return asyncio.run(fleet_key(url, secret))


@contextmanager
def stop_on_signals() -> Iterator[asyncio.Event]:
    """Yield an event that Ctrl-C or SIGTERM sets, within the event loop; a second one ends at once.

    Nothing sets it in other threads than the main one.
    """
    stop = asyncio.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    with StopSignals(stop.set, _STOP_S):
        yield stop
