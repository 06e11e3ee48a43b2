"""SSE relay: turns a worker's stream into the client's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from pigou.gateway.failure import Rejected, WorkerFailed
from pigou.gateway.proxy import reply_parsing
from pigou.gateway.proxy.reply_parsing import PROMPT_TOKEN_IDS, TOKEN_IDS, count, with_cached_tokens
from pigou.gateway.proxy.token_endpoint import TokenRequest
from pigou.gateway.request import GatewayRun, StreamCount
from pigou.lifecycle.migration import MigratedChunks, StreamState, length_frame
from pigou.wire.bodies import OverBudget
from pigou.wire.errors import DECODING_ERRORS, REQUEST_FAILED
from pigou.wire.json_limits import is_deep
from pigou.wire.sse import DONE, DONE_PAYLOAD, EventTooLong, Reader, frame

#: Finish reasons that say the worker gave up; no client knows them.
_GAVE_UP = ("abort", "error")
#: Fast paths that are made within one attempt: where no two chunks are alike, it does not pay.
_MAX_FAST_PATHS = 16
#: Events without anything for the client, comments among them, between two that have something.
MAX_IDLE_EVENTS = 4096
#: Tokens of a stream whose client set no limit, and JSON objects of one event.
_MAX_TOKENS, _MAX_OBJECTS = 2**22, 2**17
#: Chunks with text that a server without token ids may send beyond the tokens that were asked
#: for: some flush what they held back, or answer a tool's name in a chunk of its own.
_FLUSHED_TEXTS = 2
_NO_IDS = b'"token_ids":null'
_QUOTE, _BACKSLASH, _ZERO = b'"', 0x5C, 0x30
_EVENT_END = b"\n\n"
#: Token ids with more digits are left to the parser.
_MAX_ID_DIGITS = 9
_ids = msgspec.json.Decoder(list[int]).decode


class TooManyTokens(ValueError):
    """A worker sent more tokens than requested."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"the worker sent over {limit} tokens, and no more were asked for")


class Relay(StreamCount):
    """Passes a stream on chunk by chunk, and keeps its state.

    `begin` starts an attempt, `feed` takes its data. The first attempt's bytes pass unchanged,
    without internal token ids; later chunks are adapted to what the client has seen.
    """

    def __init__(self, run: GatewayRun) -> None:
        super().__init__()
        self.run = run
        self.state = StreamState()  # tokens, text shown, end
        self.muted = False  # True drops chunks until the next attempt
        self.failed: WorkerFailed | Rejected | None = None  # why the attempt cannot go on
        self._reader = Reader()
        self._idle_events = 0
        self._stock = False
        self._token_request: TokenRequest | None = None
        self._limit = run.parsed.token_limit or _MAX_TOKENS
        self._texts = 0
        self._pending = 0
        self._migrated: MigratedChunks | None = None
        self._fast_path: SSEFastPath | None = None
        self._ready: SSEFastPath | None = None
        self._fast_paths = 0
        self._learns = False

    @property
    def started(self) -> bool:
        """True if a token came; without ids, a stock worker starts with its first chunk."""
        return self.counted > 0 or (self._stock and self.state.begun)

    def begin(self, *, stock: bool, mapped: bool, tokens: TokenRequest | None = None) -> None:
        """Start an attempt on a `stock` worker or not; `mapped` continues a chat as completion.

        `tokens` translates the chunks of vLLM's generate endpoint.
        """
        self._token_request = tokens
        self.failed = None
        self.muted = False
        self._drop_reader()
        self._idle_events = self._texts = 0
        self._stock = stock
        self._fast_path = self._ready = None
        self._fast_paths = 0
        if self.state.begun:
            parsed = self.run.parsed
            self._migrated = MigratedChunks(
                self.state, chat=parsed.chat, wants_ids=parsed.wants_ids, mapped=mapped
            )

    def feed(self, data: bytes) -> bytes:
        """Return the client's bytes for a worker's bytes; sets `failed` on an error."""
        if self.muted:
            return b""
        event = None if self._ready is None else self._ready.token(data)
        if event is None:
            out = self._parse_run(data)
            self._ready = None if self._reader.pending else self._fast_path
            return out
        state = self.state
        before = len(state.tokens)
        if before >= self._limit:
            return self._cut(TooManyTokens(self._limit))
        token, text, bare = event
        state.tokens.append(token)
        self.counted += 1
        self._idle_events = 0
        if text:
            state.shown = before + 1
        return data if self.run.parsed.wants_ids else bare

    def _parse_run(self, data: bytes) -> bytes:
        """Parse as `_parse`; match whole events where all but the outer ones are one token each."""
        start, last = 0, data.rfind(_EVENT_END) + len(_EVENT_END)
        # The first two events of a stream make the template; a broken one is completed.
        for _ in range(1 if self._reader.pending else 2 * (self._fast_path is None)):
            end = data.find(_EVENT_END, start, last)
            start = last if end < 0 else end + len(_EVENT_END)
        if start >= last:
            return self._parse(data)
        out = [self._parse(data[:start])] if start else []
        # The last two may be the finish reason and the end.
        before_last = data.rfind(_EVENT_END, start, data.rfind(_EVENT_END, start, last - 2)) + 2
        for stop in (last, before_last):
            if self._reader.pending or self._fast_path is None or self.failed or self.state.done:
                break
            tokens = self._fast_path.tokens(data[start:stop])
            if tokens is not None:
                out.append(self._take_run(data[start:stop], tokens))
                start = stop
                break
        if start < len(data) and not (self.failed or self.state.done):
            out.append(self._parse(data[start:]))
        return b"".join(out)

    def _take_run(self, data: bytes, tokens: TokenEvents) -> bytes:
        """Process events of one token each."""
        state = self.state
        before = len(state.tokens)
        if before + len(tokens.ids) > self._limit:
            return self._parse(data)
        state.tokens += tokens.ids
        self.counted += len(tokens.ids)
        self._idle_events = 0
        if tokens.shown:
            state.shown = before + tokens.shown
        return data if self.run.parsed.wants_ids else tokens.bare

    def end(self) -> bytes:
        """Process the end of the stream: a last `[DONE]` needs no blank line."""
        if not self._reader.ends_done:
            return b""
        return self._parse(b"\n\n")

    def _parse(self, data: bytes) -> bytes:
        out: list[bytes] = []
        try:
            payloads = self._reader.feed(data)
            self._reserve(self._reader.size)
        except (EventTooLong, OverBudget) as error:
            self._drop_reader()
            self.failed = WorkerFailed("garbage", f"the worker sent no stream: {error}")
            return b""
        self._idle_events += self._reader.skipped
        self._reader.skipped = 0
        for payload in payloads:
            self._learns = self._fast_paths > 0 and payload is payloads[-1]
            if payload.strip() == DONE_PAYLOAD:
                self.state.done = True
                out.append(DONE)
                break
            try:
                if self._token_request is None:
                    passed = self._take(payload)
                    out += (b"data: ", passed, b"\n\n") if passed else ()
                else:
                    made = map(self._take, self._token_request.payloads(payload))
                    passed = b"".join([frame(chunk) for chunk in made if chunk])
                    out.append(passed)
            except DECODING_ERRORS as error:
                self.failed = WorkerFailed("garbage", f"the worker sent no chunk: {error}")
                break
            except TooManyTokens as error:
                out.append(self._cut(error))
                break
            except (WorkerFailed, Rejected) as failure:
                self.failed = failure
                break
            self._idle_events = 0 if passed else self._idle_events + 1
        if self._idle_events > MAX_IDLE_EVENTS and self.failed is None:
            words = f"the worker sent {self._idle_events} events without a token"
            self.failed = WorkerFailed("garbage", words)
        return b"".join(out)

    def _cut(self, error: TooManyTokens) -> bytes:
        """Fail the attempt, or end by length a stream with all its tokens."""
        self.failed = WorkerFailed("garbage", str(error))
        state = self.state
        if not self.run.parsed.single or state.head is None or len(state.tokens) < self._limit:
            return b""
        if state.finish is not None:
            return b""
        state.finish = "length"
        return length_frame(state, chat=self.run.parsed.chat)

    def _reserve(self, pending: int) -> None:
        """Count an incomplete event against the bytes of all replies."""
        if pending > self._pending:
            self.run.reply_bytes.grow(pending - self._pending)
        elif pending < self._pending:
            self.run.reply_bytes.shrink(self._pending - pending)
        self._pending = pending

    def _drop_reader(self) -> None:
        self._reader = Reader()
        self._reserve(0)

    def _learn(self, payload: bytes, choices: Sequence[reply_parsing.ChunkChoice]) -> None:
        """Make a fast path of a one-token chunk for those that follow."""
        if len(choices) != 1:
            return
        ids = choices[0].token_ids
        if choices[0].finish_reason is None and ids is not None and len(ids) == 1:
            self._fast_paths -= 1
            self._fast_path = SSEFastPath.of(frame(payload)) or self._fast_path

    def _take(self, payload: bytes) -> bytes:
        """Process one chunk; return the client's bytes, if any."""
        if not payload:
            return b""
        if b"\n" in payload:
            raise WorkerFailed("garbage", "the worker sent an event with a line break in its data")
        is_wide = len(payload) > _MAX_OBJECTS and payload.count(b"{") > _MAX_OBJECTS
        if is_wide or is_deep(payload):
            raise WorkerFailed("garbage", "the worker sent a chunk nested too deeply or too wide")
        chunk, payload = reply_parsing.chunk(payload)
        if chunk.error:
            raise _error(chunk.error, payload)
        if not chunk.choices and not reply_parsing.given(chunk.usage) and chunk.nvext is None:
            return b""
        state = self.state
        payload = self._cached(payload, chunk.usage)
        has_ids = self._count(chunk)
        if chunk.nvext is not None:
            payload = reply_parsing.without_extension(payload)
        if self._migrated is not None:
            return self._migrated.fit(payload)
        if self._learns and chunk.nvext is None and chunk.choices and chunk.choices[0].shown:
            self._learn(payload, chunk.choices)
        prompt = chunk.prompt()
        if state.head is None:
            state.head = chunk.head()
            self._keep(prompt)
            self._fast_paths = _MAX_FAST_PATHS * (
                self.run.parsed.single and not self._token_request
            )
        if (has_ids or prompt) and not self.run.parsed.wants_ids:
            return reply_parsing.without_ids(payload, bool(prompt))
        return payload

    def _cached(self, payload: bytes, usage: msgspec.Raw) -> bytes:
        cached = self.run.cached
        if cached is None or not reply_parsing.given(usage):
            return payload
        return with_cached_tokens(payload, cached)

    def _count(self, chunk: reply_parsing.RelayChunk) -> bool:
        """Record tokens, ends and shown text; return True if choices have token ids."""
        has_ids = is_shown = False
        state, choices = self.state, chunk.choices
        reported = None if chunk.nvext is None else chunk.nvext.completion_token_ids
        for choice in choices:
            if choice.finish_reason:
                if choice.finish_reason in _GAVE_UP:
                    raise WorkerFailed(choice.finish_reason, "the worker gave the request up")
                state.finish = choice.finish_reason
            shown = choice.shown
            state.reasoned = state.reasoned or (not choice.text and bool(choice.thought))
            is_shown = is_shown or bool(shown)
            if choice.token_ids:
                has_ids = True
                self._add(choice.token_ids)
            elif shown and not reported:
                self._texts += 1
                state.untold = True
        if self._texts > self._limit + _FLUSHED_TEXTS * len(choices):
            raise TooManyTokens(self._limit)
        if reported:
            self._add(reported)
        if is_shown:
            state.shown = len(state.tokens)
        if not choices:
            state.usage = True
        return has_ids

    def _add(self, ids: list[int]) -> None:
        if len(self.state.tokens) + len(ids) > self._limit:
            raise TooManyTokens(self._limit)
        self.state.tokens += ids
        self.counted += len(ids)

    def _keep(self, prompt: bytes) -> None:
        """Keep the prompt's ids for migration, while there is room."""
        try:
            self.run.reply_bytes.grow(len(prompt))
        except OverBudget as error:
            raise WorkerFailed("garbage", f"the worker sent too long a prompt: {error}") from None
        self.state.prompt = prompt


def _error(error: dict[str, Any], payload: bytes) -> WorkerFailed | Rejected:
    """Map an error chunk to the request's fault (4xx) or the worker's."""
    status = count(error.get("code")) or 500
    if 400 <= status < 500 or error.get("type") == REQUEST_FAILED:
        return Rejected(status, payload)
    return WorkerFailed("error", f"the worker said: {error.get('message')}", status=status)


class TokenEvents(NamedTuple):
    """Events of one token each."""

    ids: list[int]
    shown: int  # events up to the last one with text
    bare: bytes  # the events with null for their ids


class SSEFastPath:
    """Matches runs of events identical to a template except for text and token id.

    Such an event is valid JSON of the same meaning: the text has no quotes, escapes or control
    characters, and the id is a number.
    """

    __slots__ = ("_bare_seam", "_bare_tail", "_head", "_middle", "_size", "_tail", "_text_end")

    def __init__(self, head: bytes, text_end: bytes, tail: bytes) -> None:
        self._head, self._text_end, self._tail = head, text_end, tail
        self._size = len(head)
        self._middle = _QUOTE + text_end + TOKEN_IDS  # between text and id
        self._bare_tail = _NO_IDS + tail
        self._bare_seam = _QUOTE + text_end + self._bare_tail + head  # between two texts

    @classmethod
    def of(cls, event: bytes) -> SSEFastPath | None:
        """Return the fast path of a framed one-token chunk without an end; None for others."""
        if _BACKSLASH in event or PROMPT_TOKEN_IDS in event:
            return None
        # Each key once, so that it is the choice's: spelt otherwise it would have a backslash.
        keys = [event.count(key + _QUOTE) for key in (b'"token_ids', b'"text', b'"content')]
        if keys[0] != 1 or keys[1] + keys[2] != 1:
            return None
        before, _, rest = event.rpartition(TOKEN_IDS)
        _, _, tail = rest.partition(b"]")
        head, key, rest = before.partition(b'"text":"' if keys[1] else b'"content":"')
        _, _, text_end = rest.partition(_QUOTE)
        fast_path = cls(head + key, text_end, tail)
        return None if fast_path.token(event) is None else fast_path

    def token(self, event: bytes) -> tuple[int, bytes, bytes] | None:
        """Return id, text, and the event with null for its ids; None if it does not match."""
        before, _, rest = event.rpartition(TOKEN_IDS)
        digits, _, tail = rest.partition(b"]")
        if tail != self._tail or before[: self._size] != self._head:
            return None
        text, _, text_end = before[self._size :].partition(_QUOTE)
        if text_end != self._text_end or _BACKSLASH in text:
            return None
        if not digits.isdigit() or len(digits) > _MAX_ID_DIGITS or digits[0] == _ZERO:
            return None
        try:
            if not text.decode().isprintable():
                return None
        except UnicodeDecodeError:
            return None
        return int(digits), text, before + self._bare_tail

    def tokens(self, data: bytes) -> TokenEvents | None:
        """Return ids and text of several events; None if one of them does not match."""
        head, tail = self._head, b"]" + self._tail
        if not data.endswith(tail) or not data.startswith(head):
            return None
        events = data[len(head) : -len(tail)].split(tail + head)
        parts = [event.partition(self._middle) for event in events]
        texts = [text for text, _, _ in parts]
        digits = b",".join([id_ for _, _, id_ in parts])
        text = b"".join(texts)
        if _QUOTE in text or _BACKSLASH in text or not digits.replace(b",", b"").isdigit():
            return None
        try:
            # Texts are decoded one by one: two halves of a character make none.
            decoded = [text] if text.isascii() else texts
            if not "".join([part.decode() for part in decoded]).isprintable():
                return None
            ids = _ids(b"[%b]" % digits)
        except DECODING_ERRORS:
            return None
        if len(ids) != len(events) or max(ids) >= 10**_MAX_ID_DIGITS:
            return None
        shown = len(texts)
        while shown and not texts[shown - 1]:
            shown -= 1
        end = self._bare_seam[: -self._size]
        bare = head + self._bare_seam.join(texts) + end
        return TokenEvents(ids, shown, bare)
