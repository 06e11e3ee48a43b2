"""The outcome of a request, and the tokens of its stream, counted as its chunks arrive."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from pigou.wire.errors import DECODING_ERRORS
from pigou.wire.sse import DONE_PAYLOAD

#: Source of a chunk's number of tokens: a running usage, a usage of its own, token ids, or none
#: (one token each).
Counted = Literal["usage", "usage_per_chunk", "token_ids", "chunks"]
#: Ends of a stream that are no result (vLLM ends an aborted request so, with status 200).
_ABORTED = frozenset({"abort", "error"})
#: A final count below the chunks with text by this factor is not the whole's.
_DOUBT = 4


@dataclass(frozen=True)
class Stream:
    """A completed stream; times in ns of the client's monotonic clock."""

    first: int  # when the first token arrived
    last: int  # when the last token arrived
    tokens: int
    prompt_tokens: int | None  # as the endpoint counted them; None when it did not say
    cached_tokens: int | None  # cached prompt tokens; None when it did not say
    chunks: int
    counted: Counted  # source of the number of tokens in a chunk
    # between a token and the one before it, nanoseconds, shape (tokens - 1,), and their sum is last
    # - first. Tokens that arrive in one chunk have no gap between them. Under "chunks" there is one
    # gap a chunk after the first, whatever the chunks held.
    gaps: npt.NDArray[np.int64] = field(repr=False)


@dataclass(frozen=True)
class Failure:
    """Why a request did not end well."""

    reason: str  # one of few, to count by, like "HTTP 503" or "timeout"
    detail: str


@dataclass(frozen=True)
class SentRequest:
    """One request of a run. Times are nanoseconds of the client's monotonic clock."""

    intended: int  # when it was meant to be sent
    sent: int  # when the client began to send it
    asked_tokens: int  # output tokens asked for
    result: Stream | Failure  # the stream, or why there is none


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None

    @property
    def empty(self) -> bool:
        return not (self.content or self.reasoning_content or self.reasoning or self.tool_calls)


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None

    @property
    def empty(self) -> bool:
        return not self.text and (self.delta is None or self.delta.empty)


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_DECODER = msgspec.json.Decoder(_Chunk, strict=False)  # counts may be floats


class BrokenStream(Exception):
    """The stream is not to be used; `failure` says why."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.failure = Failure(reason, detail)


class _StreamEvent(NamedTuple):
    """A chunk of the choice: when it came, its tokens by usage and by ids, whether it has text."""

    now: int
    usage: int | None
    ids: int | None
    text: bool


class TokenCounter:
    """Token arrival times and counts of one choice.

    The first that fits the stream: a running `usage`, a `usage` per chunk, `token_ids`, or one per
    chunk with text. A final usage decides the total.
    """

    __slots__ = ("_events", "_final", "_usage", "done", "finished")

    def __init__(self) -> None:
        self.done = False
        self.finished = False
        self._events: list[_StreamEvent] = []
        self._usage: _Usage | None = None
        self._final: int | None = None

    def feed(self, payload: bytes, now: int) -> None:
        """Feed an event's payload, arrived at `now` (ns); raises `BrokenStream`."""
        if payload.strip() == DONE_PAYLOAD:
            self.done = True
            return
        if not payload.strip():
            return
        try:
            chunk = _DECODER.decode(payload)
        except DECODING_ERRORS as error:
            raise BrokenStream("malformed chunk", f"{error}: {payload[:200]!r}") from error
        if chunk.error:
            raise BrokenStream("error event", _message(chunk.error))
        usage = chunk.usage.completion_tokens if chunk.usage is not None else None
        if chunk.choices:
            choice = chunk.choices[0]
            ids = None if choice.token_ids is None else len(choice.token_ids)
            self._events.append(_StreamEvent(now, usage, ids, not choice.empty))
            if choice.finish_reason:
                self.finished = True
                if choice.finish_reason in _ABORTED:
                    raise BrokenStream("aborted", f"finish_reason is {choice.finish_reason!r}")
        elif usage is not None:
            self._final = usage
        if chunk.usage is not None:
            self._usage = chunk.usage

    def close(self) -> Stream:
        """Return the stream once its connection has ended; raises `BrokenStream`."""
        if not (self.done or self.finished):
            seen = sum(event.text for event in self._events)
            raise BrokenStream("broken stream", f"it ended after {seen} chunks, without an end")
        counted, counts = self._counts()
        times = [event.now for event, n in zip(self._events, counts, strict=True) if n > 0]
        counts = [n for n in counts if n > 0]
        if not times:
            raise BrokenStream("no tokens", "the stream ended without a token")
        usage = self._usage
        details = usage.prompt_tokens_details if usage else None
        return Stream(
            first=times[0],
            last=times[-1],
            tokens=self._total(counted, counts),
            prompt_tokens=usage.prompt_tokens if usage else None,
            cached_tokens=details.cached_tokens if details else None,
            chunks=len(times),
            counted=counted,
            gaps=_gaps(times, counts),
        )

    def _counts(self) -> tuple[Counted, list[int]]:
        events = self._events
        usages = [event.usage for event in events]
        if any(value is not None for value in usages):
            own = self._own_usage()
            if own is not None:
                return "usage_per_chunk", own
            growth = self._growth()
            if growth is not None:
                return "usage", growth
        if any(event.ids for event in events):
            return "token_ids", [event.ids or 0 for event in events]
        return "chunks", [int(event.text) for event in events]

    def _growth(self) -> list[int] | None:
        """Return how much each chunk's usage grew; None unless it is a running total."""
        growth, last, texts, grew = [], 0, 0, 0
        for event in self._events:
            now = last if event.usage is None else event.usage
            if now < last:
                return None
            growth.append(now - last)
            texts += event.text
            grew += event.text and now > last
            last = now
        # A total that stands still while text comes is reported at one end of the stream only.
        return growth if last > 0 and 2 * grew >= texts else None

    def _own_usage(self) -> list[int] | None:
        """Return each chunk's usage; None unless it tells that chunk's own tokens."""
        usages = [event.usage or 0 for event in self._events]
        texts = [event.usage for event in self._events if event.text]
        if len(texts) < 2 or not all(texts):
            return None
        falls = any(b < a for a, b in itertools.pairwise(usages) if b)
        if self._final is not None:
            same = sum(usages) == self._final != max(usages)
            return usages if same else None
        level = len(set(texts)) == 1
        # Equal counts without a final one: each chunk's own, unless they are the whole's.
        return usages if falls or (level and texts[0] != len(texts)) else None

    def _total(self, counted: Counted, counts: list[int]) -> int:
        """Return the tokens of the whole: as told at the end, where that can be believed."""
        seen = sum(counts)
        final = self._final
        if final is None and counted in ("token_ids", "chunks") and self._usage is not None:
            final = self._usage.completion_tokens
        if not final or _DOUBT * final < len(counts):
            return seen
        return final


def _gaps(times: list[int], counts: list[int]) -> npt.NDArray[np.int64]:
    gaps = np.zeros(sum(counts) - 1, np.int64)
    # The first token of chunk i has as many tokens before it as the chunks before i held.
    starts = np.cumsum(counts[:-1], dtype=np.int64) - 1
    gaps[starts] = np.diff(np.array(times, np.int64))
    return gaps


def _message(error: Any) -> str:
    message = error.get("message") if isinstance(error, dict) else error
    return str(message)[:500]
