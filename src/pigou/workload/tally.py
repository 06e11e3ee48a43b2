"""Counts the tokens of one stream as its chunks arrive."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from pigou.wire.sse import DONE_PAYLOAD
from pigou.workload.outcome import Counted, Failure, Stream

#: Ends of a stream that are no result (vLLM ends an aborted request so, with status 200).
_ABORTED = frozenset({"abort", "error"})


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
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
    choices: list[_Choice] = msgspec.field(default_factory=list)
    usage: _Usage | None = None
    error: Any = None


_DECODER = msgspec.json.Decoder(_Chunk)


class Broken(Exception):
    """The stream is not to be used; `failure` says why."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.failure = Failure(reason, detail)


class Tally:
    """One choice's tokens: when they came, and how many at a time.

    A chunk's tokens are counted, in this order of preference, by the growth of its `usage`, by its
    `token_ids`, or as one when it brings text; the first chunk with tokens decides which. The
    final usage, where there is one, decides the number of tokens of the whole.
    """

    __slots__ = ("_counted", "_counts", "_seen", "_times", "_usage", "done", "finished")

    def __init__(self) -> None:
        self.done = False
        self.finished = False
        self._counted: Counted | None = None
        self._counts: list[int] = []
        self._times: list[int] = []
        self._seen = 0
        self._usage: _Usage | None = None

    def feed(self, payload: bytes, now: int) -> None:
        """Take one event's payload, which arrived at `now` (nanoseconds).

        Raises:
            Broken: it is an error event, an aborted end, or no chunk of a completion.
        """
        if payload == DONE_PAYLOAD:
            self.done = True
            return
        try:
            chunk = _DECODER.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Broken("malformed chunk", f"{error}: {payload[:200]!r}") from error
        if chunk.error is not None:
            raise Broken("error event", _message(chunk.error))
        if chunk.choices:
            choice = chunk.choices[0]
            self._count(choice, chunk.usage, now)
            if choice.finish_reason is not None:
                self.finished = True
                if choice.finish_reason in _ABORTED:
                    raise Broken("aborted", f"finish_reason is {choice.finish_reason!r}")
        if chunk.usage is not None:
            self._usage = chunk.usage

    def _count(self, choice: _Choice, usage: _Usage | None, now: int) -> None:
        if self._counted is None:
            if usage is not None:
                self._counted = "usage"
            elif choice.token_ids:
                self._counted = "token_ids"
            elif not choice.empty:
                self._counted = "chunks"
        if self._counted == "usage":
            count = usage.completion_tokens - self._seen if usage else 0
        elif self._counted == "token_ids":
            count = len(choice.token_ids or ())
        else:
            count = int(not choice.empty)
        if count > 0:
            self._seen += count
            self._times.append(now)
            self._counts.append(count)

    def close(self) -> Stream:
        """Return what the stream brought, once its connection has ended it.

        Raises:
            Broken: it ended before its end was told, or brought no token.
        """
        if not (self.done or self.finished):
            raise Broken("broken stream", f"it ended after {self._seen} tokens, without an end")
        if self._counted is None or not self._times:
            raise Broken("no tokens", "the stream ended without a token")
        usage = self._usage
        tokens = usage.completion_tokens if usage and usage.completion_tokens else self._seen
        details = usage.prompt_tokens_details if usage else None
        return Stream(
            first=self._times[0],
            last=self._times[-1],
            tokens=tokens,
            prompt_tokens=usage.prompt_tokens if usage else None,
            cached_tokens=details.cached_tokens if details else None,
            chunks=len(self._times),
            counted=self._counted,
            gaps=_gaps(self._times, self._counts),
        )


def _gaps(times: list[int], counts: list[int]) -> npt.NDArray[np.int64]:
    gaps = np.zeros(sum(counts) - 1, np.int64)
    # The first token of chunk i has as many tokens before it as the chunks before i held.
    starts = np.cumsum(counts[:-1], dtype=np.int64) - 1
    gaps[starts] = np.diff(np.array(times, np.int64))
    return gaps


def _message(error: Any) -> str:
    message = error.get("message") if isinstance(error, dict) else error
    return str(message)[:500]
