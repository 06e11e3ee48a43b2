"""Frames of the side channel: a length (4 bytes, big-endian), then a tagged MessagePack map.

```
receiver                        sender
Hello     ------------------->          with a fleet secret: once per connection
          <-------------------  Challenge  the sender's proof
Proof     ------------------->          the receiver's
Open      ------------------->          which blocks, by which backend
          <-------------------  Grant   details for the backend; or Refuse
          <-------------------  Checksums of the blocks, once computed
          <-------------------  Data    tcp only, repeated: a count, then that many blocks, raw
Renew     ------------------->          shm only, while it copies
Done      ------------------->          all blocks received: release
          <-------------------  Confirm if the lease was held until now
Decline   ------------------->          instead of Open: release
          <-------------------  Confirm
```
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TypeAlias, TypeVar

import msgspec
import numpy as np

from pigou.kv.checksum import Checksums
from pigou.request import SECOND
from pigou.wire.fleet_secret import FleetSecret
from pigou.worker.kv_transfer.transfer_params import TransferError, TransferReason

#: Max frame bytes that a sender reads.
MAX_REQUEST = 64 << 10
_LENGTH = struct.Struct("!I")
#: Buffers per system call.
_IOV_MAX = 512
#: Bytes read ahead for a frame, so that one call mostly suffices.
_AHEAD = 4096
_Frame = TypeVar("_Frame")
_encode = msgspec.msgpack.Encoder().encode
_NONCE_BYTES = 32
_MIN_NONCE, _MAX_NONCE = 16, 64


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Begins mutual authentication; 16 to 64 random bytes."""

    nonce: bytes


class Challenge(msgspec.Struct, frozen=True, tag="challenge"):
    """Proves the sender's knowledge of the secret, and asks for the receiver's."""

    nonce: bytes
    mac: bytes


class Proof(msgspec.Struct, frozen=True, tag="proof"):
    """Proves the receiver's knowledge of the secret."""

    mac: bytes


class Open(msgspec.Struct, frozen=True, tag="open"):
    """Requests blocks `first` to `first + count` of an offer; `last_hash` as in the ticket."""

    engine: str
    request: str
    secret: str
    layout: str
    first: int
    count: int
    backend: str
    last_hash: str = ""


class Decline(msgspec.Struct, frozen=True, tag="decline"):
    """Declines an offer."""

    engine: str
    request: str
    secret: str


class Renew(msgspec.Struct, frozen=True, tag="renew"):
    """Signals that the receiver is still copying."""


class Done(msgspec.Struct, frozen=True, tag="done"):
    """Signals that the receiver has all it needs; `blocks` are verified."""

    blocks: int


class GrantFrame(msgspec.Struct, frozen=True, tag="grant"):
    """Grants the blocks."""

    details: dict[str, bytes | int]  # for the backend's receiving end
    patience: float  # seconds that the sender waits for a renewal


class ChecksumsFrame(msgspec.Struct, frozen=True, tag="checksums"):
    """xxh3 of each block: uint64, little-endian, concatenated."""

    xxh3: bytes


class Refuse(msgspec.Struct, frozen=True, tag="refuse"):
    """Refuses the request, or ends it early."""

    reason: str
    detail: str


class Data(msgspec.Struct, frozen=True, tag="data"):
    """Announces `blocks` raw blocks after this frame."""

    blocks: int


class Confirm(msgspec.Struct, frozen=True, tag="confirm"):
    """Tells whether the lease was held until release."""

    held: bool


Request: TypeAlias = Hello | Proof | Open | Decline | Renew | Done
Reply: TypeAlias = Challenge | GrantFrame | ChecksumsFrame | Refuse | Data | Confirm

REQUESTS: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
REPLIES: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


class SideChannelLink:
    """One side-channel connection; every wait is bounded by `timeout` (ns)."""

    def __init__(self, sock: socket.socket, timeout: int) -> None:
        self._sock = sock
        self._timeout = timeout
        self._ahead = bytearray()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, frame: Request | Reply, payload: Sequence[memoryview] = ()) -> None:
        """Send a frame and raw buffers, without copying the latter."""
        body = _encode(frame)
        head = memoryview(_LENGTH.pack(len(body)) + body)
        self._send_all([head, *payload])

    def receive(self, decoder: msgspec.msgpack.Decoder[_Frame], limit: int) -> _Frame:
        """Receive a frame; raises TransferError CUT, TIMEOUT, or PROTOCOL beyond `limit` bytes."""
        self._fill(_LENGTH.size)
        (length,) = _LENGTH.unpack_from(self._ahead)
        if length > limit:
            raise TransferError(
                TransferReason.PROTOCOL, f"a frame of {length} bytes; at most {limit}"
            )
        end = _LENGTH.size + length
        self._fill(end)
        body = bytes(self._ahead[_LENGTH.size : end])
        del self._ahead[:end]
        try:
            return decoder.decode(body)
        except msgspec.DecodeError as error:
            raise TransferError(TransferReason.PROTOCOL, f"no such frame: {error}") from error

    def receive_into(self, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers in order; raises TransferError CUT or TIMEOUT."""
        left = [buffer for buffer in buffers if buffer.nbytes]
        while left and self._ahead:
            count = min(left[0].nbytes, len(self._ahead))
            left[0][:count] = self._ahead[:count]
            del self._ahead[:count]
            left = _after_bytes(left, count)
        deadline = time.monotonic_ns() + self._timeout
        while left:
            left = _after_bytes(left, self._receive(left[:_IOV_MAX], deadline))

    def _fill(self, size: int) -> None:
        """Read ahead at least `size` bytes."""
        deadline = time.monotonic_ns() + self._timeout
        while (missing := size - len(self._ahead)) > 0:
            room = memoryview(bytearray(max(missing, _AHEAD)))
            self._ahead += room[: self._receive([room], deadline)]

    def _receive(self, buffers: Sequence[memoryview], deadline: int) -> int:
        self._patience(deadline)
        try:
            count = self._sock.recvmsg_into(buffers)[0]
        except OSError as error:
            raise _failure(error) from error
        if count == 0:
            raise TransferError(TransferReason.CUT, "the peer closed the connection")
        return count

    def _send_all(self, buffers: Sequence[memoryview]) -> None:
        left = [buffer for buffer in buffers if buffer.nbytes]
        deadline = time.monotonic_ns() + self._timeout
        while left:
            self._patience(deadline)
            try:
                count = self._sock.sendmsg(left[:_IOV_MAX])
            except OSError as error:
                raise _failure(error) from error
            left = _after_bytes(left, count)

    def _patience(self, deadline: int) -> None:
        seconds = (deadline - time.monotonic_ns()) / SECOND
        if seconds <= 0:
            raise TransferError(
                TransferReason.TIMEOUT, f"no end after {self._timeout / SECOND:g} s"
            )
        try:
            self._sock.settimeout(seconds)
        except OSError as error:
            raise _failure(error) from error

    def close(self) -> None:
        """Close the connection, and wake its waiting thread."""
        with suppress(OSError):  # already closed by the peer
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


def _after_bytes(buffers: list[memoryview], count: int) -> list[memoryview]:
    for i, buffer in enumerate(buffers):
        if count < buffer.nbytes:
            return [buffer[count:], *buffers[i + 1 :]]
        count -= buffer.nbytes
    return []


def _failure(error: OSError) -> TransferError:
    if isinstance(error, TimeoutError):
        return TransferError(TransferReason.TIMEOUT, "the peer fell silent")
    return TransferError(TransferReason.CUT, str(error))


_Reply = TypeVar("_Reply", bound=Reply)


def expect(link: SideChannelLink, kind: type[_Reply], limit: int = 4096) -> _Reply:
    """Receive a frame of `kind`; raises TransferError on Refuse, another frame, CUT or TIMEOUT."""
    reply = link.receive(REPLIES, limit)
    if isinstance(reply, Refuse):
        known = reply.reason in set(TransferReason)
        reason = TransferReason(reply.reason) if known else TransferReason.PROTOCOL
        raise TransferError(reason, reply.detail[:500])
    if not isinstance(reply, kind):
        raise out_of_turn(reply)
    return reply


def out_of_turn(frame: Request | Reply) -> TransferError:
    """Return the error of a frame that was not due."""
    return TransferError(TransferReason.PROTOCOL, f"{type(frame).__name__} out of turn")


def expect_checksums(link: SideChannelLink, count: int) -> Checksums:
    """Receive the checksums of `count` blocks; raises TransferError as `expect`."""
    raw = expect(link, ChecksumsFrame, 4096 + 8 * count).xxh3
    if len(raw) != 8 * count:
        raise TransferError(
            TransferReason.PROTOCOL, f"{len(raw)} bytes of checksums for {count} blocks"
        )
    return np.frombuffer(raw, dtype="<u8").astype(np.uint64)


def transfer_key(secret: FleetSecret) -> bytes:
    """Return the key that authenticates a fleet's tickets and side channels."""
    return secret.key("kv-transfer")


def prove_as_receiver(link: SideChannelLink, key: bytes) -> None:
    """Authenticate mutually with a sender; raises TransferError UNPROVEN, or as `expect`."""
    mine = secrets.token_bytes(_NONCE_BYTES)
    link.send(Hello(mine))
    challenge = expect(link, Challenge)
    if not hmac.compare_digest(challenge.mac, _mac(key, b"sender", mine, challenge.nonce)):
        raise TransferError(TransferReason.UNPROVEN, "the sender does not know the fleet's secret")
    link.send(Proof(_mac(key, b"receiver", mine, challenge.nonce)))


def prove_as_sender(link: SideChannelLink, key: bytes) -> None:
    """Authenticate a receiver before serving it; raises TransferError UNPROVEN, or as `receive`."""
    hello = link.receive(REQUESTS, MAX_REQUEST)
    if not isinstance(hello, Hello) or not _MIN_NONCE <= len(hello.nonce) <= _MAX_NONCE:
        raise TransferError(
            TransferReason.UNPROVEN, "this sender serves who knows the fleet's secret, and no other"
        )
    mine = secrets.token_bytes(_NONCE_BYTES)
    link.send(Challenge(mine, _mac(key, b"sender", hello.nonce, mine)))
    proof = link.receive(REQUESTS, MAX_REQUEST)
    good = isinstance(proof, Proof) and hmac.compare_digest(
        proof.mac, _mac(key, b"receiver", hello.nonce, mine)
    )
    if not good:
        raise TransferError(
            TransferReason.UNPROVEN, "the receiver does not know the fleet's secret"
        )


def _mac(key: bytes, role: bytes, receiver: bytes, sender: bytes) -> bytes:
    parts = (role, receiver, sender)
    return hmac.digest(key, b"".join(len(p).to_bytes(2) + p for p in parts), "sha256")
