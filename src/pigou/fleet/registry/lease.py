"""The lease keeper: when a worker registers, renews its lease, and tries again."""

from __future__ import annotations

import random
from enum import Enum

import msgspec

from pigou.fleet.reconnect_backoff import ReconnectBackoff
from pigou.request import SECOND


class LeaseAction(Enum):
    """What a worker has to do with the registry."""

    REGISTER = "register"
    RENEW = "renew"


class LeaseStep(msgspec.Struct, frozen=True):
    """The next call to the registry."""

    action: LeaseAction
    at_ns: int  # when, by the clock that the keeper is told


class LeaseKeeper:
    """Keeps one worker registered. Pure: the clock is an argument, calls are returned.

    A renewal falls due after half of the time that remains, so that a failed one is tried again
    at 3/4 and 7/8 of it, before the lease ends. A lost lease ends nothing: the worker registers
    again, after a random wait, and serves meanwhile.

    Attributes:
        registered: whether the lease runs, as far as is known.
        lapses: times that the lease was lost.
    """

    def __init__(
        self, ttl_s: float, seed: int = 0, backoff: ReconnectBackoff | None = None
    ) -> None:
        """Begin unregistered; the first step is due at once.

        Args:
            ttl_s: seconds that the lease lasts.
            backoff: between tries.
        """
        self._ttl_ns = round(ttl_s * SECOND)
        self._rng = random.Random(seed)
        self._backoff = backoff or ReconnectBackoff()
        self._expires_ns = self._due_ns = 0
        self._failures = 0
        self.registered = False
        self.lapses = 0

    def step(self, now: int) -> LeaseStep:
        """Return the next call; due now where its time is in the past."""
        if self.registered and now >= self._expires_ns:
            self.lost(now)
        action = LeaseAction.RENEW if self.registered else LeaseAction.REGISTER
        return LeaseStep(action, max(now, self._due_ns))

    def succeeded(self, sent: int, now: int) -> None:
        """Note that a call was answered well.

        The lease lasts from when it was sent, which is before the registry got it.

        Args:
            sent: when it was sent.
            now: when it was answered.
        """
        self.registered, self._failures = True, 0
        self._expires_ns = sent + self._ttl_ns
        self._due_ns = now + max(0, self._expires_ns - now) // 2

    def failed(self, now: int) -> None:
        """Note that a call was not answered, or refused for now."""
        self._failures += 1
        wait_ns = self._backoff.wait_ns(self._failures, self._rng)
        if self.registered and now < self._expires_ns:
            min_ns = round(self._backoff.min_s * SECOND)
            wait_ns = max((self._expires_ns - now) // 2, min_ns)
        self._due_ns = now + wait_ns

    def lost(self, now: int) -> None:
        """Note that the registry does not know the worker any more: it registers again soon.

        It does so at another time than others whose leases ended, too.
        """
        self.lapses += self.registered
        self.registered = False
        self._due_ns = now + round(self._backoff.min_s * SECOND * self._rng.random())
