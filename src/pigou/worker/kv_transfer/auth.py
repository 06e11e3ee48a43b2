"""Who is at the other end of a side channel: both ends show that they know the fleet's key.

Each proves it on what the other chose, by HMAC-SHA256 (RFC 2104) over its own role and both nonces,
so that nothing heard on one connection is of use on another.
"""

from __future__ import annotations

import hmac
import secrets

from pigou.wire.fleet_secret import FleetSecret
from pigou.worker.kv_transfer.replies import expect
from pigou.worker.kv_transfer.result import Reason, TransferError
from pigou.worker.kv_transfer.side_channel_protocol import (
    MAX_REQUEST,
    REQUESTS,
    Challenge,
    Hello,
    Link,
    Proof,
)

_NONCE_BYTES = 32
_LEAST, _MOST = 16, 64


def transfer_key(secret: FleetSecret) -> bytes:
    """Return the key by which tickets and side channels of a fleet are authenticated."""
    return secret.key("kv-transfer")


def prove_as_receiver(link: Link, key: bytes) -> None:
    """Prove to a sender that the key is known here, once it has proved the same.

    Raises:
        TransferError: UNPROVEN, when it has not; or as `expect`.
    """
    mine = secrets.token_bytes(_NONCE_BYTES)
    link.send(Hello(mine))
    challenge = expect(link, Challenge)
    if not hmac.compare_digest(challenge.mac, _mac(key, b"sender", mine, challenge.nonce)):
        raise TransferError(Reason.UNPROVEN, "the sender does not know the fleet's secret")
    link.send(Proof(_mac(key, b"receiver", mine, challenge.nonce)))


def prove_as_sender(link: Link, key: bytes) -> None:
    """Let a receiver prove that it knows the key, before it is answered anything else.

    Raises:
        TransferError: UNPROVEN, when it does not; or as `Link.receive`.
    """
    hello = link.receive(REQUESTS, MAX_REQUEST)
    if not isinstance(hello, Hello) or not _LEAST <= len(hello.nonce) <= _MOST:
        raise TransferError(
            Reason.UNPROVEN, "this sender serves who knows the fleet's secret, and no other"
        )
    mine = secrets.token_bytes(_NONCE_BYTES)
    link.send(Challenge(mine, _mac(key, b"sender", hello.nonce, mine)))
    proof = link.receive(REQUESTS, MAX_REQUEST)
    good = isinstance(proof, Proof) and hmac.compare_digest(
        proof.mac, _mac(key, b"receiver", hello.nonce, mine)
    )
    if not good:
        raise TransferError(Reason.UNPROVEN, "the receiver does not know the fleet's secret")


def _mac(key: bytes, role: bytes, receiver: bytes, sender: bytes) -> bytes:
    parts = (role, receiver, sender)
    return hmac.digest(key, b"".join(len(p).to_bytes(2) + p for p in parts), "sha256")
