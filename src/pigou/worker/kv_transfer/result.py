"""How a pull ended, and the counters of both sides."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum


class TransferReason(StrEnum):
    """Why a pull brought all, or not all, of the blocks."""

    OK = "ok"
    BAD_PARAMS = "bad_params"
    LAYOUT = "layout_mismatch"
    UNKNOWN = "unknown_request"
    FORGED = "forged_ticket"
    UNPROVEN = "unproven_peer"
    OTHER_PROMPT = "other_prompt"
    EXPIRED = "lease_expired"
    CORRUPT = "checksum_mismatch"
    UNREACHABLE = "sender_unreachable"
    CUT = "connection_lost"
    TIMEOUT = "timeout"
    PROTOCOL = "protocol_error"
    STORE = "store_error"
    BUSY = "busy"
    CANCELLED = "cancelled"
    CLOSED = "closed"


class TransferError(Exception):
    """A transfer that cannot go on: the reason, and a detail for the log."""

    def __init__(self, reason: TransferReason, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else str(reason))
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True)
class TransferResult:
    """What a pull brought."""

    request: str  # id of the request at the sender; empty when the ticket could not be read
    blocks: int  # leading destination blocks that hold verified bytes
    tokens: int  # tokens in those blocks (the last block of a prompt may be part full)
    reason: TransferReason  # why it ended there
    detail: str = ""  # for the log; empty when all went well
    backend: str = ""  # which moved the bytes; empty when none did
    bytes: int = 0  # bytes in `blocks`
    seconds: float = 0.0  # from the beginning of the pull (not counting its wait for a thread)


@dataclass(frozen=True, slots=True)
class TransferStats:
    """Counters since the start."""

    transfers: int = 0  # transfers that ended, well or not
    blocks: int = 0  # blocks that arrived verified (Receiver) or were taken and confirmed (Sender)
    bytes: int = 0
    seconds: float = 0.0  # sum of the transfers' durations
    # transfers that did not bring everything, by reason.
    failures: dict[str, int] = field(default_factory=dict)


class TransferCounters:
    """Counters that several threads add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stats = TransferStats()
        self._failures: Counter[str] = Counter()

    def add(self, blocks: int, size: int, seconds: float, reason: TransferReason) -> None:
        """Count one transfer of `size` bytes in `seconds`."""
        with self._lock:
            was = self._stats
            if reason is not TransferReason.OK:
                self._failures[reason] += 1
            self._stats = TransferStats(
                was.transfers + 1, was.blocks + blocks, was.bytes + size, was.seconds + seconds
            )

    def stats(self) -> TransferStats:
        """Return the counters as they are now."""
        with self._lock:
            was = self._stats
            return TransferStats(
                was.transfers, was.blocks, was.bytes, was.seconds, dict(self._failures)
            )
