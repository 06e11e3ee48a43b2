"""What a receiver expects to hear from a sender, checked."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from pigou.kv.checksum import Checksums
from pigou.worker.kv_transfer.result import Reason, TransferError
from pigou.worker.kv_transfer.side_channel_protocol import (
    REPLIES,
    ChecksumsFrame,
    Link,
    Refuse,
    Reply,
)

_Reply = TypeVar("_Reply", bound=Reply)


def expect(link: Link, kind: type[_Reply], limit: int = 4096) -> _Reply:
    """Receive a frame of this kind, of at most `limit` bytes.

    Raises:
        TransferError: the reason of a Refuse, PROTOCOL for any other frame, CUT, TIMEOUT.
    """
    reply = link.receive(REPLIES, limit)
    if isinstance(reply, Refuse):
        known = reply.reason in set(Reason)
        reason = Reason(reply.reason) if known else Reason.PROTOCOL
        raise TransferError(reason, reply.detail[:500])
    if not isinstance(reply, kind):
        raise TransferError(Reason.PROTOCOL, f"{type(reply).__name__} out of turn")
    return reply


def expect_checksums(link: Link, count: int) -> Checksums:
    """Receive the checksums of `count` blocks.

    Raises:
        TransferError: as `expect`.
    """
    raw = expect(link, ChecksumsFrame, 4096 + 8 * count).xxh3
    if len(raw) != 8 * count:
        raise TransferError(Reason.PROTOCOL, f"{len(raw)} bytes of checksums for {count} blocks")
    return np.frombuffer(raw, dtype="<u8").astype(np.uint64)
