"""ZMQ CURVE between a worker that publishes KV events and whoever subscribes to them.

Both ends' keys come from the fleet secret. The publisher's public key is never sent, so that only
who knows the secret can shake hands with it, and is sure in turn whom it hears.
"""

from __future__ import annotations

from typing import Any

import zmq
from zmq.utils import z85

from pigou.config import ConfigError
from pigou.wire.fleet_secret import FleetSecret


def secure_server(socket: zmq.Socket[Any], secret: FleetSecret) -> None:
    """Let a socket that binds talk to who knows the secret alone; before it is bound.

    Raises:
        ConfigError: this libzmq has no CURVE.
    """
    _check()
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, _private(secret, "publisher"))


def secure_client(socket: zmq.Socket[Any], secret: FleetSecret) -> None:
    """Let a socket that connects talk to a publisher that knows the secret alone.

    Raises:
        ConfigError: this libzmq has no CURVE.
    """
    _check()
    own = _private(secret, "subscriber")
    socket.setsockopt(zmq.CURVE_SERVERKEY, zmq.curve_public(_private(secret, "publisher")))
    socket.setsockopt(zmq.CURVE_SECRETKEY, own)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(own))


def _private(secret: FleetSecret, who: str) -> bytes:
    return bytes(z85.encode(secret.key(f"kv-events {who}")))


def _check() -> None:
    if not zmq.has("curve"):
        raise ConfigError(
            "the fleet has a secret, and this libzmq has no CURVE for KV events: install pyzmq's "
            "own wheel, or turn KV events off (--no-kv-events)"
        )
