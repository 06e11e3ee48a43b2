"""Accounts for a picked request and its reply, by the bytes that the proxy shows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

import msgspec

from pigou.control.messages import Choice, Ended, FirstToken, PrefillDone, Shed
from pigou.gateway.model_routing import GatewayModel
from pigou.gateway.proxy.reply_parsing import ReplyUsage, given, whole
from pigou.gateway.proxy.reply_parsing import chunk as parse_chunk
from pigou.gateway.proxy.upstream import Upstream
from pigou.gateway.request import GatewayRun, StreamCount
from pigou.integrations.ext_proc_stream import Headers, ResponseStart
from pigou.request import SECOND, FinishReason
from pigou.wire.errors import DECODING_ERRORS, APIError
from pigou.wire.openai_requests import without_bom
from pigou.wire.sse import DONE_PAYLOAD, EventTooLong, Reader

#: Maximum bytes of a whole reply whose usage is read.
_MAX_REPLY = 4 * 1024 * 1024
_usage = msgspec.json.Decoder(ReplyUsage).decode


class PickedRequest:
    """A request from its pick to its end, as the control plane accounts for it."""

    def __init__(self, run: GatewayRun, model: GatewayModel) -> None:
        self.run, self.model, self.driver = run, model, model.plane_driver
        self.head: ResponseStart | None = None
        self._upstream: Upstream | None = None  # the worker that serves it
        self._tokens = ReplyTokens()
        self._finish = FinishReason.ABORT
        self._moving: asyncio.Task[None] | None = None
        if run.metered is not None:
            run.metered.relays.append(self._tokens)
        self.driver.watch(run.parsed.id, self._tokens)

    def route(self, choice: Choice | None, upstream: Upstream | None) -> None:
        """Set the workers that serve it, and count it at the one that decodes."""
        self.run.choice = choice
        if self._upstream is not None:
            self._upstream.inflight -= 1
        if upstream is not None:
            upstream.inflight += 1
        self._upstream = upstream

    def began(self, head: ResponseStart, served: str, endpoints: Mapping[str, str]) -> None:
        """Note the reply's head, and the endpoint that the proxy says served it."""
        self.head = head
        self._tokens.begin(head.headers)
        choice, id = self.run.choice, self.run.parsed.id
        assert choice is not None
        if served and served != endpoints.get(choice.decode):
            worker = next((name for name, at in endpoints.items() if at == served), "")
            self.route(choice, self.driver.upstreams.get(worker))
            if worker:
                self._moving = asyncio.create_task(self._move(worker))
            else:
                self.driver.observe(Ended(id, FinishReason.ABORT))
        elif choice.prefill is not None:
            self.driver.observe(PrefillDone(id, head.status < 400))

    async def _move(self, worker: str) -> None:
        """Account for a fallback: the request is routed again, to the worker that has it."""
        request = self.run.request(0, frozenset({worker}))
        decision = await self.driver.decide(request, frozenset())
        if not isinstance(decision, Shed):
            self.run.choice = decision.choice

    def feed(self, data: bytes) -> None:
        """Take bytes of the reply."""
        tokens, stats, before = self._tokens, self.run.stats, self._tokens.counted
        tokens.feed(data)
        if self._upstream is not None:
            self._upstream.bytes_read += len(data)
            self._upstream.tokens += tokens.counted - before
        if tokens.counted and not stats.first_token:
            stats.first_token = tokens.last_token_ns
            self.driver.observe(FirstToken(self.run.parsed.id))
            self._meter_prompt()
            seconds = (stats.first_token - self.run.parsed.arrival) / SECOND
            self.model.metrics.first_token.observe(seconds)

    def finish(self) -> None:
        """End it with its reply, or with an error of the worker or the proxy."""
        tokens, run, metrics = self._tokens, self.run, self.model.metrics
        tokens.end()
        if self.head is not None and self.head.status >= 400:
            self._finish = FinishReason.ERROR
            if run.metered is not None:
                status = self.head.status
                run.metered.error = APIError(status, f"The worker answered {status}.", type="reply")
            return
        self._finish = FinishReason.LENGTH if tokens.finish == "length" else FinishReason.STOP
        self._meter_prompt()
        prompt_tokens = tokens.prompt_tokens or run.prompt_tokens
        run.stats.add(prompt_tokens, tokens.counted)
        run.stats.worker = None if run.choice is None else run.choice.decode
        metrics.generation_tokens.labels(run.parsed.tenant).inc(tokens.counted)
        metrics.prompt_tokens.labels(run.parsed.tenant).inc(prompt_tokens)
        metrics.duration.observe((time.monotonic_ns() - run.parsed.arrival) / SECOND)

    def end(self) -> None:
        """Release all that it takes."""
        if self._moving is not None:
            self._moving.cancel()
        self.route(self.run.choice, None)
        self.driver.end(self.run.parsed.id, self._finish)

    def _meter_prompt(self) -> None:
        run, choice = self.run, self.run.choice
        routed = self.driver.plane.state.requests.get(run.parsed.id)
        if choice is not None:
            uncached = None if routed is None else routed.uncached
            self.driver.meter.begun(run, choice.prefill or choice.decode, uncached)


class ReplyTokens(StreamCount):
    """Counts a reply's tokens from its bytes: chunks with text, then the usage that it reports."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt_tokens = 0  # 0 if the reply does not say
        self.finish = ""
        self._reader: Reader | None = None  # splits server-sent events
        self._body: list[bytes] | None = None  # parts of a whole reply
        self._size = self._chunks = 0

    def begin(self, headers: Headers) -> None:
        """Read the head; a compressed reply is not counted."""
        kind = headers.get("content-type", "")
        if headers.get("content-encoding", "identity") != "identity":
            return
        self._reader = Reader() if "text/event-stream" in kind else None
        self._body = [] if "json" in kind else None

    def feed(self, data: bytes) -> None:
        """Count the tokens of more bytes."""
        before = self.counted
        if self._reader is not None:
            try:
                for payload in self._reader.feed(data):
                    if payload.strip() != DONE_PAYLOAD:
                        self._take(payload)
            except EventTooLong:
                self._reader = None
        elif self._body is not None:
            self._size += len(data)
            self._body.append(data)
            self._body = self._body if self._size <= _MAX_REPLY else None
        if self.counted > before:
            self.last_token_ns = time.monotonic_ns()

    def end(self) -> None:
        """Read the usage of a whole reply."""
        try:
            reply = None if self._body is None else whole(without_bom(b"".join(self._body)))
        except DECODING_ERRORS:
            return
        if reply is not None:
            self.finish = next((choice.finish_reason or "" for choice in reply.choices), "")
            if reply.usage is not None:
                self._report(reply.usage)

    def _take(self, payload: bytes) -> None:
        try:
            chunk, _ = parse_chunk(payload)
            usage = _usage(chunk.usage) if given(chunk.usage) else None
        except DECODING_ERRORS:
            return  # the client's to judge
        for choice in chunk.choices:
            # A chat's first chunk has the role alone; later ones may have other text (reasoning).
            is_role = self._chunks == 0 and not choice.shown
            if choice.token_ids is not None:
                self.counted += len(choice.token_ids)
            elif choice.shown or not (is_role or choice.finish_reason):
                self.counted += 1
            self.finish = choice.finish_reason or self.finish
        self._chunks += bool(chunk.choices)
        if usage is not None:
            self._report(usage)

    def _report(self, usage: ReplyUsage) -> None:
        self.prompt_tokens = usage.prompt_tokens
        self.counted = max(self.counted, usage.completion_tokens)
