"""The relay: bytes of a worker's stream in, bytes of the client's stream out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from pigou.gateway import chunks
from pigou.gateway.call import Call
from pigou.gateway.failure import Rejected, WorkerFailed
from pigou.gateway.migration import MigratedChunks
from pigou.gateway.mould import Mould
from pigou.gateway.regular import count, with_cached_tokens
from pigou.lifecycle.migration import StreamState
from pigou.wire.errors import REQUEST_FAILED
from pigou.wire.json_limits import is_deep
from pigou.wire.sse import DONE, DONE_PAYLOAD, EventTooLong, Reader, frame

#: Finish reasons that say the worker gave up; no client knows them.
_GAVE_UP = ("abort", "error")
#: Moulds that are made within one attempt: where no two chunks are alike, it does not pay.
_MOULDS = 16
#: Events without anything for the client, comments among them, between two that have something.
MAX_IDLE_EVENTS = 4096


class Relay:
    """Passes a stream on, chunk by chunk, and keeps what the client was told.

    `begin` starts each attempt; `feed` takes what its worker sends. Within the first attempt a
    chunk's bytes pass as they are, without the token ids that only the gateway asked for. In
    later attempts chunks are decoded and made to fit what the client saw before.

    Attributes:
        state: what the client was told.
        counted: tokens of all choices so far.
        muted: what comes is dropped, until the next attempt.
        failed: why the attempt cannot go on, set by `feed`; None while it can.
    """

    def __init__(self, call: Call) -> None:
        self.call = call
        self.state = StreamState()
        self.counted = 0
        self.muted = False
        self.failed: WorkerFailed | Rejected | None = None
        self._reader = Reader()
        self._idle_events = 0
        self._stock = False
        self._full = True
        self._migrated: MigratedChunks | None = None
        self._mould: Mould | None = None
        self._ready: Mould | None = None
        self._moulds = 0
        self._learns = False

    @property
    def started(self) -> bool:
        """Whether a token came. A stock worker that tells no ids begins with its first one."""
        return self.counted > 0 or (self._stock and self.state.begun)

    def begin(self, *, stock: bool, mapped: bool) -> None:
        """Start an attempt.

        Args:
            stock: the worker does not resume by itself, so it matters what has been shown.
            mapped: a chat is continued on the completions route.
        """
        self.failed = None
        self.muted = False
        self._reader = Reader()
        self._idle_events = 0
        self._stock = stock
        self._full = stock or not self.state.begun or not self.call.single
        self._mould = self._ready = None
        self._moulds = 0
        if self.state.begun:
            self._migrated = MigratedChunks(self.call, self.state, mapped)

    def feed(self, data: bytes) -> bytes:
        """Take bytes of the worker; return bytes for the client, possibly none.

        When the worker sends an error, or what is no chunk, `failed` is set, and what came
        before it is returned.
        """
        if self.muted:
            return b""
        found = None if self._ready is None else self._ready.token(data)
        if found is None:
            out = self._parse(data)
            self._ready = None if self._reader.pending else self._mould
            return out
        token, text, bare = found
        tokens = self.state.tokens
        tokens.append(token)
        self.counted += 1
        self._idle_events = 0
        if text and self._stock:
            self.state.shown = len(tokens)
        return data if self.call.wants_ids else bare

    def end(self) -> bytes:
        """Take the end of the worker's bytes: a last `[DONE]` needs no blank line after it."""
        if not self._reader.ends_done:
            return b""
        return self._parse(b"\n\n")

    def _parse(self, data: bytes) -> bytes:
        out: list[bytes] = []
        try:
            payloads = self._reader.feed(data)
        except EventTooLong as error:
            self.failed = WorkerFailed("garbage", f"the worker sent no stream: {error}")
            return b""
        self._idle_events += self._reader.skipped
        self._reader.skipped = 0
        self._learns = self._moulds > 0 and len(payloads) == 1
        for payload in payloads:
            if payload.strip() == DONE_PAYLOAD:
                self.state.done = True
                out.append(DONE)
                break
            try:
                passed = self._take(payload)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                self.failed = WorkerFailed("garbage", f"the worker sent no chunk: {error}")
                break
            except (WorkerFailed, Rejected) as failure:
                self.failed = failure
                break
            self._idle_events = 0 if passed else self._idle_events + 1
            if passed:
                out += (b"data: ", passed, b"\n\n")
        if self._idle_events > MAX_IDLE_EVENTS and self.failed is None:
            words = f"the worker sent {self._idle_events} events without a token"
            self.failed = WorkerFailed("garbage", words)
        return b"".join(out)

    def _learn(self, payload: bytes, choices: Sequence[chunks.Choice]) -> None:
        """Make a mould of a chunk that is one token amid the reply, for those that follow."""
        if len(choices) != 1 or b"\n" in payload:
            return
        ids = choices[0].token_ids
        if choices[0].finish_reason is None and ids is not None and len(ids) == 1:
            self._moulds -= 1
            self._mould = Mould.of(frame(payload)) or self._mould

    def _take(self, payload: bytes) -> bytes:
        """Note one chunk; return what the client gets of it, nothing where it is no chunk."""
        if not payload:
            return b""
        if is_deep(payload):
            raise WorkerFailed("garbage", "the worker sent a chunk that is nested too deeply")
        if self._full:
            return self._take_full(payload)
        chunk, payload = chunks.chunk(payload)
        if chunk.error:
            raise _error(chunk.error, payload)
        if not chunk.choices and not chunks.given(chunk.usage):
            return b"" if chunk.nvext is None else payload
        payload = self._cached(payload, chunk.usage)
        has_ids = self._count(chunk.choices)
        if chunk.nvext is not None:
            payload = self._extended(payload, chunk.nvext)
        if self._migrated is not None:
            return self._migrated.fit(payload)
        if self._learns and chunk.nvext is None:
            self._learn(payload, chunk.choices)
        if has_ids and not self.call.wants_ids:
            return chunks.without_ids(payload, False)
        return payload

    def _take_full(self, payload: bytes) -> bytes:
        """Do the same where a chunk may hold the prompt's ids, or its text matters."""
        chunk, payload = chunks.full_chunk(payload)
        if chunk.error:
            raise _error(chunk.error, payload)
        if not chunk.choices and not chunks.given(chunk.usage) and chunk.nvext is None:
            return b""
        payload = self._cached(payload, chunk.usage)
        state = self.state
        has_ids = self._count(chunk.choices)
        if chunk.nvext is not None:
            payload = self._extended(payload, chunk.nvext)
        if any(choice.shown for choice in chunk.choices):
            state.shown = len(state.tokens)
        if self._migrated is not None:
            return self._migrated.fit(payload)
        if self._learns and chunk.nvext is None and chunk.choices and chunk.choices[0].shown:
            self._learn(payload, chunk.choices)
        prompt = chunk.prompt()
        if state.head is None:
            state.head = chunk.head()
            state.prompt = prompt
            self._full = self._stock or not self.call.single
            self._moulds = _MOULDS if self.call.single else 0
        if (has_ids or prompt) and not self.call.wants_ids:
            return chunks.without_ids(payload, bool(prompt))
        return payload

    def _cached(self, payload: bytes, usage: msgspec.Raw) -> bytes:
        """Return a chunk with what the prefill worker had cached, where that is known."""
        cached = self.call.cached
        if cached is None or not chunks.given(usage):
            return payload
        return with_cached_tokens(payload, cached)

    def _count(self, choices: Sequence[chunks.Choice]) -> bool:
        """Note tokens and ends; return whether there are token ids."""
        found = False
        for choice in choices:
            if choice.finish_reason:
                if choice.finish_reason in _GAVE_UP:
                    raise WorkerFailed(choice.finish_reason, "the worker gave the request up")
                self.state.finish = choice.finish_reason
            ids = choice.token_ids
            if ids:
                found = True
                self.state.tokens += ids
                self.counted += len(ids)
        if not choices:
            self.state.usage = True
        return found

    def _extended(self, payload: bytes, extension: chunks.Extension) -> bytes:
        """Note the token ids that a frontend of Dynamo told; return what the client gets."""
        ids = extension.completion_token_ids
        if ids:
            self.state.tokens += ids
            self.counted += len(ids)
        return chunks.without_extension(payload)


def _error(error: dict[str, Any], payload: bytes) -> WorkerFailed | Rejected:
    """Return what an error chunk means: the request's fault (4xx), or the worker's."""
    status = count(error.get("code")) or 500
    if 400 <= status < 500 or error.get("type") == REQUEST_FAILED:
        return Rejected(status, payload)
    return WorkerFailed("error", f"the worker said: {error.get('message')}", status=status)
