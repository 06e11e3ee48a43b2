"""Prompts of a window: waits by length, and repeats (retry storms)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypedDict

import numpy as np

from pigou.request import Request

#: Remembered prompts.
_LENGTHS = 1000
#: A long prompt has this many times the median's tokens, and is in this longest share.
_TIMES, _SHARE = 4.0, 0.1
#: Seconds within which a repeat counts, and remembered prompts.
_WITHIN_S, _PROMPTS = 60.0, 20_000
#: Buckets of waits in seconds and of prompts in tokens, and seconds of recent maxima.
WAIT_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)
TOKEN_BOUNDS = tuple(2.0**power for power in range(4, 23))
_RECENT_S = 10


class WaitFigures(TypedDict):
    """Waits of short and long prompts, as in `FleetObservation`."""

    short_wait_p50_s: float | None
    short_wait_p95_s: float | None
    long_wait_max_s: float | None


class PromptLengths:
    """Lengths of the last thousand prompts."""

    def __init__(self) -> None:
        self._order: deque[int] = deque()
        self._ascending: list[int] = []

    def add(self, tokens: int) -> None:
        """Add a prompt's length."""
        if len(self._order) == _LENGTHS:
            del self._ascending[bisect_left(self._ascending, self._order.popleft())]
        self._order.append(tokens)
        insort(self._ascending, tokens)

    def is_long(self, tokens: int) -> bool:
        """True if a prompt is in the longest tenth and over four times the median."""
        known = self._ascending
        if not known:
            return False
        tenth = known[int((1.0 - _SHARE) * (len(known) - 1))]
        return tokens >= tenth and tokens > _TIMES * known[len(known) // 2]

    def wait_figures(self, wait_s: Sequence[tuple[int, float]]) -> WaitFigures:
        """Return the waits of short and long prompts, from (tokens, seconds so far) of each."""
        short: list[float] = []
        long: list[float] = []
        for tokens, wait in wait_s:
            (long if self.is_long(tokens) else short).append(wait)
        return {
            "short_wait_p50_s": percentile(short, 50), "short_wait_p95_s": percentile(short, 95),
            "long_wait_max_s": max(long, default=None),
        }  # fmt: skip


@dataclass(slots=True)
class _WaitingPrompt:
    tokens: int
    arrived_s: float
    routed_s: float = 0.0  # 0 before
    begun: bool = False


class PromptWaits:
    """Waits at gateway and workers, from arrival to computation, of short and long prompts.

    A stream's wait ends with its first token, a long one's less twice its own prefill; a whole
    reply's ends when it is routed.
    """

    def __init__(self, prefill_s: Callable[[str], float]) -> None:
        """`prefill_s` forecasts a routed request's own prefill, in seconds."""
        self.lengths = PromptLengths()
        self.by_length = {length: BucketCounts(WAIT_BOUNDS) for length in ("short", "long")}
        self.begun_tokens = BucketCounts(TOKEN_BOUNDS)  # lengths of prompts whose computation began
        self._prefill_s = prefill_s
        self._open: dict[str, _WaitingPrompt] = {}
        self._long_s = _RecentMaximum()

    def arrive(self, request: str, tokens: int, now_s: float) -> None:
        """Add a request; a migrating one is known already."""
        if request not in self._open:
            self.lengths.add(tokens)
            self._open[request] = _WaitingPrompt(tokens, now_s)

    def route(self, request: str, now_s: float, *, streamed: bool) -> None:
        """Record that a request was sent to a worker."""
        prompt = self._open.get(request)
        if prompt is not None and not prompt.routed_s:
            prompt.routed_s = now_s
            if not streamed:
                self._begin(prompt, now_s, now_s - prompt.arrived_s)

    def begin(self, request: str, now_s: float) -> None:
        """Record a stream's first token."""
        prompt = self._open.get(request)
        if prompt is not None and not prompt.begun:
            self._begin(prompt, now_s, self._wait_s(request, prompt, now_s))

    def end(self, request: str, now_s: float) -> None:
        """End a request; unknown ids are ignored."""
        self.begin(request, now_s)
        self._open.pop(request, None)

    def _begin(self, prompt: _WaitingPrompt, now_s: float, wait_s: float) -> None:
        prompt.begun = True
        if prompt.routed_s:
            self.begun_tokens.add(prompt.tokens)
        is_long = self.lengths.is_long(prompt.tokens)
        self.by_length["long" if is_long else "short"].add(wait_s)
        if is_long:
            self._long_s.add(now_s, wait_s)

    def _wait_s(self, request: str, prompt: _WaitingPrompt, now_s: float) -> float:
        end_s = now_s
        if prompt.routed_s and self.lengths.is_long(prompt.tokens):
            end_s = max(prompt.routed_s, now_s - 2.0 * self._prefill_s(request))
        return end_s - prompt.arrived_s

    def late(self, now_s: float) -> list[str]:
        """Return the streams that wait at workers, a second or longer."""
        return [
            request for request, prompt in self._open.items()
            if not prompt.begun and 0.0 < prompt.routed_s < now_s - 1.0
            and now_s - prompt.routed_s > 1.0 + 2.0 * self._prefill_s(request)
        ]  # fmt: skip

    def maxima(self, now_s: float) -> tuple[float, int]:
        """Return the longest wait of a long prompt of the last 10 s, and tokens at workers now."""
        late_s, tokens = self._long_s.of(now_s), 0
        for request, prompt in self._open.items():
            if not prompt.begun and self.lengths.is_long(prompt.tokens):
                late_s = max(late_s, self._wait_s(request, prompt, now_s))
            if not prompt.begun and prompt.routed_s:
                tokens = max(tokens, prompt.tokens)
        return late_s, tokens


class BucketCounts:
    """A histogram."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0  # sum of all values
        self._bounds = bounds

    def add(self, value: float, times: int = 1) -> None:
        """Count a value `times` times."""
        self.counts[bisect_left(self._bounds, value)] += times
        self.total += value * times

    def merge(self, other: BucketCounts) -> None:
        """Add the counts of a histogram with the same bounds."""
        self.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        self.total += other.total

    @property
    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts by upper bound."""
        bounds = (*map(str, map(float, self._bounds)), "+Inf")
        return list(zip(bounds, accumulate(self.counts), strict=True))


class _RecentMaximum:
    """Largest value of the last ten seconds."""

    def __init__(self) -> None:
        self._seconds: deque[tuple[int, float]] = deque(maxlen=_RECENT_S)

    def add(self, now_s: float, value: float) -> None:
        second = int(now_s)
        if self._seconds and self._seconds[-1][0] == second:
            value = max(value, self._seconds.pop()[1])
        self._seconds.append((second, value))

    def of(self, now_s: float) -> float:
        recent = (value for second, value in self._seconds if now_s - second <= _RECENT_S)
        return max(recent, default=0.0)


def percentile(values: Iterable[float], percent: float) -> float | None:
    """Return a percentile of values; None without any."""
    numbers = np.fromiter(values, dtype=np.float64)
    return float(np.percentile(numbers, percent)) if len(numbers) else None


def prompt_key(request: Request) -> Hashable | None:
    """Return a key of a request's prompt; None without a full block."""
    for keys in (*request.keys.values(), request.hashes[:, 0]):
        if len(keys):
            return request.tenant, request.prompt, int(keys[-1])
    return None


class RepeatedPrompts:
    """Counts prompts that return after an abandoned, refused or failed attempt; bounded memory."""

    def __init__(self) -> None:
        self.count = 0
        self._open: dict[str, Hashable] = {}
        self._unserved: OrderedDict[Hashable, float] = OrderedDict()

    def arrive(self, request: str, prompt: Hashable | None, now_s: float) -> bool:
        """Add a request's prompt (None: unknown); return whether its client repeated it."""
        if prompt is None or request in self._open:
            return False
        self._open[request] = prompt
        at = self._unserved.pop(prompt, None)
        repeated = at is not None and now_s - at <= _WITHIN_S
        self.count += repeated
        return repeated

    def end(self, request: str, now_s: float, *, served: bool) -> None:
        """End a request; unknown ids are ignored."""
        prompt = self._open.pop(request, None)
        if prompt is None or served:
            return
        self._unserved[prompt] = now_s
        self._unserved.move_to_end(prompt)
        if len(self._unserved) > _PROMPTS:
            self._unserved.popitem(last=False)
