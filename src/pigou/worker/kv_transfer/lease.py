"""Leases: how long offered blocks are held for a receiver, and their single release."""

from __future__ import annotations

import hmac
import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from pigou.kv.checksum import Checksums
from pigou.logs import about
from pigou.request import NEVER, SECOND, Ints
from pigou.worker.kv_transfer.transfer_params import TransferError, TransferReason

log = logging.getLogger(__name__)
_Key = TypeVar("_Key")


@dataclass(slots=True)
class _Lease:
    expiry: int
    limit: int


class LeaseClock(Generic[_Key]):
    """Tracks lease expiries by key; all times in integer nanoseconds.

    A lease ends exactly once, by `end` or `expire`. It is never extended beyond `max_hold` after
    its grant, nor renewed after expiry.
    """

    def __init__(self, term: int, max_hold: int) -> None:
        self._term = term
        self._max_hold = max_hold
        self._leases: dict[_Key, _Lease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def begin(self, key: _Key, now: int) -> int:
        """Begin a lease and return its expiry; raises ValueError if `key` holds one."""
        if key in self._leases:
            raise ValueError(f"lease {key} is held already")
        expiry = now + min(self._term, self._max_hold)
        self._leases[key] = _Lease(expiry, now + self._max_hold)
        return expiry

    def renew(self, key: _Key, now: int) -> bool:
        """Extend a lease to a full term from `now`; False if it has ended or expired."""
        lease = self._leases.get(key)
        if lease is None or now >= lease.expiry:
            return False
        lease.expiry = max(lease.expiry, min(now + self._term, lease.limit))
        return True

    def end(self, key: _Key) -> bool:
        """End a lease; True if this call ended it."""
        return self._leases.pop(key, None) is not None

    def expire(self, now: int) -> list[_Key]:
        """End expired leases; return their keys, oldest grant first."""
        past = [key for key, lease in self._leases.items() if now >= lease.expiry]
        for key in past:
            del self._leases[key]
        return past

    def next_expiry(self) -> int:
        """Return the next expiry; NEVER without leases."""
        return min((lease.expiry for lease in self._leases.values()), default=NEVER)


@dataclass(eq=False, slots=True)
class LeasedBlocks:
    """Blocks of one request that a receiver may take."""

    request: str  # request id
    blocks: Ints  # device blocks in prompt order, shape (n,)
    tokens: int  # tokens in the blocks
    last_hash: str = ""  # hash of the last block; empty if unknown
    secret: str = field(default_factory=lambda: secrets.token_hex(16))
    # valid once `ready` is set and `error` is empty.
    checksums: Checksums | None = None
    error: str = ""  # why there are no checksums
    # set once the checksums are computed or have failed.
    ready: threading.Event = field(default_factory=threading.Event)


class LeaseTable:
    """Offers by request id; each is released exactly once, by `on_release`."""

    def __init__(self, lease: int, max_hold: int, on_release: Callable[[str], None]) -> None:
        """Lease offers for `lease` ns, `max_hold` in all; any thread calls `on_release`."""
        self._leases: LeaseClock[LeasedBlocks] = LeaseClock(lease, max_hold)
        self._offers: dict[str, LeasedBlocks] = {}
        self._expected: set[str] = set()
        self._sleeps_until = 0
        self._on_release = on_release
        self._change = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        with self._change:
            return len(self._offers)

    def expect(self, request: str, expected: bool = True) -> None:
        """Let `find` wait for the offer of a request, until it is added or not expected."""
        with self._change:
            (self._expected.add if expected else self._expected.discard)(request)
            self._change.notify_all()

    def add(
        self, request: str, blocks: Ints, tokens: int, last_hash: str = "", secret: str = ""
    ) -> LeasedBlocks:
        """Add an offer; raises ValueError on a duplicate request, TransferError CLOSED."""
        with self._change:
            if self._closed:
                raise TransferError(TransferReason.CLOSED, "the sender is closed")
            if request in self._offers:
                raise ValueError(f"request {request!r} is offered already")
            offer = LeasedBlocks(request, blocks, tokens, last_hash)
            offer.secret = secret or offer.secret
            self._offers[request] = offer
            expiry = self._leases.begin(offer, time.monotonic_ns())
            if expiry < self._sleeps_until or request in self._expected:
                self._expected.discard(request)
                self._change.notify_all()
            return offer

    def find(self, request: str, secret: str, wait_s: float = 0.0) -> LeasedBlocks:
        """Return a held offer, waiting if it is expected; raises TransferError UNKNOWN."""
        with self._change:
            self._change.wait_for(lambda: request not in self._expected, wait_s)
            offer = self._offers.get(request)
        known = offer is not None and hmac.compare_digest(offer.secret.encode(), secret.encode())
        if offer is None or not known or not self.keep(offer):
            raise TransferError(
                TransferReason.UNKNOWN, "no such offer: taken, expired or never made"
            )
        return offer

    def keep(self, offer: LeasedBlocks) -> bool:
        """Renew an offer's lease; False if it was lost, which voids the bytes sent."""
        with self._change:
            return self._leases.renew(offer, time.monotonic_ns())

    def finish(self, offer: LeasedBlocks) -> bool:
        """Release an offer's blocks; True if they were held until now."""
        with self._change:
            held = self._leases.renew(offer, time.monotonic_ns())
            ended = self._leases.end(offer)
            if ended:
                del self._offers[offer.request]
        if ended:
            self._released(offer)
        return held

    def release(self, request: str) -> bool:
        """Release a request's blocks, if held; True if this call released them."""
        with self._change:
            offer = self._offers.get(request)
            if offer is None or not self._leases.end(offer):
                return False
            del self._offers[request]
        self._released(offer)
        return True

    def reap(self) -> None:
        """Release offers as they expire; returns after `close`."""
        while True:
            with self._change:
                if self._closed:
                    return
                now = time.monotonic_ns()
                past = self._leases.expire(now)
                for offer in past:
                    del self._offers[offer.request]
                if not past:
                    self._sleeps_until = expiry = self._leases.next_expiry()
                    self._change.wait(None if expiry == NEVER else (expiry - now) / SECOND)
                    self._sleeps_until = 0  # awake: it checks before sleeping again
            for offer in past:
                words = "blocks of request %s expired before they were taken"
                log.warning(words, offer.request, extra=about(offer.request))
                self._released(offer)

    def close(self) -> None:
        """Release all offers, refuse new ones, and let `reap` return."""
        with self._change:
            self._closed = True
            self._expected.clear()
            left = [offer for offer in self._offers.values() if self._leases.end(offer)]
            self._offers.clear()
            self._change.notify_all()
        for offer in left:
            self._released(offer)

    def _released(self, offer: LeasedBlocks) -> None:
        try:
            self._on_release(offer.request)
        except Exception:
            log.exception(
                "on_release failed for request %s", offer.request, extra=about(offer.request)
            )
