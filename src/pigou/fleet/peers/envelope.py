"""The envelope of a message between gateways: who made it knew the fleet secret."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from pigou.control.peers.sync_messages import PeerState, ResendRequest, SyncMessage
from pigou.wire.fleet_secret import FleetSecret

#: Use of the fleet secret whose key signs messages.
_USE = "gateway-peers"
_TAG, _TIME = 32, 8
#: Milliseconds by which the clocks of two hosts may differ; older messages are repetitions.
MAX_SKEW_MS = 60_000


class PeerEnvelopeError(ValueError):
    """A message that does not count: the text says why."""


class PeerEnvelope:
    """Seals and opens messages: HMAC-SHA256 over the time and the message.

    The key is of this use alone. A message of another fleet, a changed one, or one that was
    recorded more than a minute ago does not count. One that is repeated within that time changes
    nothing, since each number in it has a sequence number.
    """

    def __init__(self, secret: FleetSecret) -> None:
        self._secret = secret
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_words)
        self._decoder: msgspec.msgpack.Decoder[SyncMessage] = msgspec.msgpack.Decoder(
            PeerState | ResendRequest, dec_hook=_array
        )

    def sign(self, message: SyncMessage, unix_ms: int) -> bytes:
        """Return a message as it is sent at a time, in milliseconds since 1970."""
        body = unix_ms.to_bytes(_TIME, "big") + self._encoder.encode(message)
        return self._secret.sign(_USE, body) + body

    def open(self, data: bytes, unix_ms: int) -> SyncMessage:
        """Return the message.

        Args:
            unix_ms: milliseconds since 1970.

        Raises:
            PeerEnvelopeError: who made it did not know the secret, it is old, or not understood.
        """
        tag, body = data[:_TAG], data[_TAG:]
        if not self._secret.verifies(_USE, body, tag):
            raise PeerEnvelopeError("it was not made with this fleet's secret")
        sent_ms = int.from_bytes(body[:_TIME], "big")
        if abs(unix_ms - sent_ms) > MAX_SKEW_MS:
            raise PeerEnvelopeError(f"it was made {(unix_ms - sent_ms) / 1000:.0f} s ago")
        try:
            return self._decoder.decode(body[_TIME:])
        except (msgspec.DecodeError, ValueError) as error:
            raise PeerEnvelopeError(f"it is not understood: {error}") from error


def _words(value: Any) -> bytes:
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value, dtype="<u8").tobytes()
    raise NotImplementedError(f"a message cannot hold {type(value).__name__}")


def _array(_: Any, value: Any) -> Any:
    if not isinstance(value, bytes) or len(value) % 8:
        raise ValueError("keys are not 64-bit words")
    return np.frombuffer(value, dtype="<u8").astype(np.uint64)
