"""Leases: how long blocks are kept for a receiver. Pure: the time is an argument."""

from __future__ import annotations

from dataclasses import dataclass

from pigou.request import NEVER


@dataclass(slots=True)
class _Lease:
    expiry: int
    limit: int


class LeaseTable:
    """Who holds a lease until when, all times in integer nanoseconds.

    A lease ends exactly once: by `end`, or by appearing in the answer of `expire`. It is never
    extended beyond `max_hold` after its grant, and never revived after its expiry.
    """

    def __init__(self, term: int, max_hold: int) -> None:
        self._term = term
        self._max_hold = max_hold
        self._leases: dict[int, _Lease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, key: int, now: int) -> int:
        """Begin a lease and return when it expires.

        Raises:
            ValueError: `key` holds one already.
        """
        if key in self._leases:
            raise ValueError(f"lease {key} is held already")
        expiry = now + min(self._term, self._max_hold)
        self._leases[key] = _Lease(expiry, now + self._max_hold)
        return expiry

    def renew(self, key: int, now: int) -> bool:
        """Extend a lease to a full term from `now`; False when it has ended or is past."""
        lease = self._leases.get(key)
        if lease is None or now >= lease.expiry:
            return False
        lease.expiry = max(lease.expiry, min(now + self._term, lease.limit))
        return True

    def end(self, key: int) -> bool:
        """End a lease; whether it was this call that did."""
        return self._leases.pop(key, None) is not None

    def expire(self, now: int) -> list[int]:
        """End the leases that are past, and return their keys, oldest grant first."""
        past = [key for key, lease in self._leases.items() if now >= lease.expiry]
        for key in past:
            del self._leases[key]
        return past

    def next_expiry(self) -> int:
        """When the next lease expires; NEVER when there is none."""
        return min((lease.expiry for lease in self._leases.values()), default=NEVER)
