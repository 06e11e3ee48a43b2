"""What one API key may have under way: sequences that run, sequences and tokens that wait."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from pigou.config import ConfigError
from pigou.gateway.call import Call
from pigou.wire.errors import APIError

_RETRY_AFTER = 1


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Limits of a key; 0 for none. A sequence is one choice (`n`) of one prompt.

    Attributes:
        sequences: most of them at the workers at once; further ones wait.
        queued: most of them that wait, those of a request that has just come included; beyond,
            a request is answered 429.
        queued_tokens: the same for the tokens that they ask for, prompt and `max_tokens`.
    """

    sequences: int = 0
    queued: int = 0
    queued_tokens: int = 0

    def check(self, where: str) -> None:
        """Raise `ConfigError`, which begins with `where`, for a negative limit."""
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value < 0:
                raise ConfigError(
                    f"{where}: limits.{name} is {value}; it must be at least 0, which is no limit"
                )


class Usage:
    """What one key has under way.

    Attributes:
        running: sequences at workers.
        waiting: sequences that were accepted and are not at a worker.
        tokens: that these ask for.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.running = self.waiting = self.tokens = 0
        self._turns: deque[asyncio.Future[None]] = deque()

    @contextmanager
    def accepted(self, sequences: int, tokens: int) -> Iterator[Share]:
        """Within it, a request of so many sequences, of so many tokens each, is under way.

        Raises:
            APIError: 429, naming the limit that the request does not fit in.
        """
        self._check("queued", self.waiting, sequences)
        self._check("queued_tokens", self.tokens, sequences * tokens)
        share = Share(self, sequences, tokens)
        try:
            yield share
        finally:
            share.close()

    def _check(self, name: str, now: int, more: int) -> None:
        limit = getattr(self.limits, name)
        if not limit or now + more <= limit:
            return
        what = "sequences" if name == "queued" else "tokens"
        remedy = "wait for those under way" if more <= limit else "send fewer in one request"
        raise APIError(
            429,
            f"limits.{name} of this API key is {limit}: {now} {what} wait, and this request (its "
            f"prompts times n, and max_tokens) asks for {more} more; {remedy}.",
            "n" if name == "queued" else "max_tokens",
            retry_after=_RETRY_AFTER,
        )

    async def _take(self) -> None:
        """Wait until one more sequence may run, first come, first served."""
        most = self.limits.sequences
        if not most or (self.running < most and not self._turns):
            self.running += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turns.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give()
            else:
                self._turns.remove(turn)
            raise

    def _give(self) -> None:
        """One sequence less runs: the next one may."""
        self.running -= 1
        while self._turns and self.running < self.limits.sequences:
            turn = self._turns.popleft()
            if not turn.done():
                self.running += 1
                turn.set_result(None)


class Share:
    """What one request has of its key's limits."""

    def __init__(self, usage: Usage, sequences: int, tokens: int) -> None:
        self._usage = usage
        self._tokens = tokens
        self._waiting = 0
        self._running: set[str] = set()
        self._count(sequences)

    async def take(self, call: str, timeout_s: float | None) -> None:
        """Wait until a sequence may run; does nothing where it has run already.

        Raises:
            APIError: 429, it waited for so many seconds.
        """
        if call in self._running:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._usage._take()
        except TimeoutError:
            most = self._usage.limits.sequences
            raise APIError(
                429,
                f"limits.sequences of this API key is {most}: so many run, and this request waited "
                f"{timeout_s:g} s for one of them to end; send fewer at once.",
                retry_after=_RETRY_AFTER,
            ) from None
        self._running.add(call)

    def sent(self) -> None:
        """A sequence is at a worker: it waits no more."""
        if self._waiting:
            self._count(-1)

    def ended(self, call: str) -> None:
        """A sequence is over."""
        if call in self._running:
            self._running.discard(call)
            self._usage._give()

    def close(self) -> None:
        """The request is over, with all its sequences."""
        self._count(-self._waiting)
        for call in list(self._running):
            self.ended(call)

    def _count(self, sequences: int) -> None:
        self._waiting += sequences
        self._usage.waiting += sequences
        self._usage.tokens += sequences * self._tokens


class KeyUsage:
    """What each key has under way, by its hash."""

    def __init__(self) -> None:
        self._usage: dict[bytes, Usage] = {}

    def of(self, digest: bytes, limits: Limits) -> Usage:
        """Return what a key has under way."""
        found = self._usage.get(digest)
        if found is None or found.limits != limits:
            found = self._usage[digest] = Usage(limits)
        return found

    @contextmanager
    def accepted(self, digest: bytes, limits: Limits, call: Call) -> Iterator[None]:
        """Within it, a request of a key is under way; its sequences take turns by the limits.

        Raises:
            APIError: 429, the key has too much under way.
        """
        if limits == Limits():
            yield
            return
        sequences = call.choices * len(call.prompts)
        tokens = call.prompt // len(call.prompts) + call.max_tokens
        with self.of(digest, limits).accepted(sequences, tokens) as call.share:
            yield
