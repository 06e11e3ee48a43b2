"""The life of a request: route, two legs, relay, and again elsewhere when a worker fails."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec

from pigou.config import ConfigError
from pigou.control.messages import FirstToken, PrefillDone, ReadFailed, Route, Tokens
from pigou.gateway import sequences
from pigou.gateway.call import COMPLETIONS, Body, Call
from pigou.gateway.failure import End, Rejected, WorkerFailed
from pigou.gateway.lender import lent
from pigou.gateway.line import Line, LineError
from pigou.gateway.metrics import Metrics
from pigou.gateway.outlet import Outlet
from pigou.gateway.overrides import refused
from pigou.gateway.pilot import Pilot, Recalled, Refused
from pigou.gateway.regular import cached_tokens, whole, with_cached_tokens
from pigou.gateway.relay import Relay
from pigou.gateway.resume import can_resume, sending
from pigou.gateway.splice import closing, out_of_room
from pigou.gateway.upstream import Engine, Upstream
from pigou.request import SECOND, FinishReason
from pigou.wire.errors import SUSPECT, APIError
from pigou.wire.openai_requests import without_bom
from pigou.wire.prefill_decode_legs import leg_one, leg_two, ticket

_log = logging.getLogger("pigou.gateway")

#: Failures in a row, none with a token between them, after which a request is given up: it may
#: be the request that breaks the workers.
MAX_FAILURES = 4
#: Failures of one request altogether.
MAX_MOVES = 16
#: Deaths of workers with the same request under way, after which it is not sent again.
MAX_DEATHS = 2
#: Seconds within which workers that are killed from outside count as killed at once.
SAME_KILL_S = 2
_END_S = 1.0


class Generator:
    """Serves generation requests over the fleet."""

    def __init__(self, pilot: Pilot, metrics: Metrics) -> None:
        self._pilot = pilot
        self._metrics = metrics

    async def whole(self, call: Call) -> bytes:
        """Return the JSON body of a reply that is not streamed.

        Raises:
            APIError: no worker could serve it. Rejected: a worker refused it.
        """
        if sequences.splits(call):
            reply = await sequences.whole(self._pilot, call, self._whole)
        else:
            reply = await self._whole(call)
        self._metrics.duration.observe((time.monotonic_ns() - call.arrival) / SECOND)
        return reply

    async def _whole(self, call: Call) -> bytes:
        """Return the reply of one sequence, or of several that are not to be split."""
        reason = FinishReason.ABORT
        try:
            reply = await self._persist(Relay(call), self._fetch)
            reason = FinishReason.STOP
        except (APIError, Rejected):
            reason = FinishReason.ERROR
            raise
        finally:
            self._end(call, reason)
        return reply

    async def stream(self, call: Call, outlet: Outlet) -> None:
        """Stream a reply to `outlet`.

        Raises:
            APIError, Rejected: as `whole`; when something was written before, the caller ends the
                stream with an error event.
        """
        if sequences.splits(call):
            await sequences.stream(self._pilot, call, outlet, self._stream)
        else:
            await self._stream(call, outlet)
        self._metrics.duration.observe((time.monotonic_ns() - call.arrival) / SECOND)

    async def _stream(self, call: Call, outlet: Outlet) -> None:
        """Stream one sequence, or several that are not to be split."""

        async def attempt(relay: Relay, tried: frozenset[str]) -> bytes:
            await self._relay(relay, tried, outlet)
            return b""

        relay = Relay(call)
        self._pilot.watch(relay)
        reason = FinishReason.ABORT
        try:
            await self._persist(relay, attempt)
            reason = FinishReason.STOP
        except (APIError, Rejected):
            reason = FinishReason.ERROR
            raise
        finally:
            self._end(call, reason)
            self._metrics.generation_tokens.labels(call.tenant).inc(relay.counted)
            self._metrics.prompt_tokens.labels(call.tenant).inc(relay.transcript.prompt_size)
            call.stats.add(relay.transcript.prompt_size, relay.counted)

    def _end(self, call: Call, reason: FinishReason) -> None:
        """A sequence is over."""
        self._pilot.end(call.id, reason)
        if call.choice is not None:
            call.stats.worker = call.choice.decode
        if call.share is not None:
            call.share.ended(call.id)

    async def _persist(
        self,
        relay: Relay,
        attempt: Callable[[Relay, frozenset[str]], Awaitable[bytes]],
    ) -> bytes:
        """Attempt until it is served, or there is no sense in trying again."""
        tried: frozenset[str] = frozenset()
        failures = 0
        last = WorkerFailed("recalled", "it was taken from worker to worker")
        for _ in range(MAX_MOVES):
            before = relay.counted
            try:
                with self._pilot.attempting(relay):
                    return await attempt(relay, tried)
            except Recalled as recalled:
                tried = frozenset({recalled.worker})
                self._metrics.migrations.labels("prompt", "recalled").inc()
                continue
            except WorkerFailed as failure:
                failures = 1 if relay.counted > before else failures + 1
                tried = failure.workers | (tried if relay.counted == before else frozenset())
                last = failure
                await self._suspect(relay, failure, relay.counted > before)
            except Refused as refused:
                message = f"The fleet is busy: {refused}. Try again later."
                raise APIError(
                    refused.status, message, retry_after=refused.retry_after
                ) from refused
            if failures == MAX_FAILURES:
                break
            phase = "stream" if relay.counted else "prompt"
            self._metrics.migrations.labels(phase, last.reason).inc()
        self._metrics.unfinished.labels(last.reason).inc()
        raise _surrender(last)

    async def _suspect(self, relay: Relay, failure: WorkerFailed, progressed: bool) -> None:
        """Count a worker's death against the request that was under way on it.

        A death from outside says nothing against a request that got tokens until then. Workers
        that are killed at the same time are one death: a request may be sent on in between.

        Raises:
            APIError: it was under way at too many deaths, and is not sent again.
        """
        if failure.fate is None or not failure.may_be_death:
            return
        now = time.monotonic_ns()
        end = await failure.fate()
        if end is End.LIVES or (progressed and end is not End.CRASHED):
            return
        if end is End.KILLED:
            again = now < relay.killed_ns + SAME_KILL_S * SECOND
            relay.killed_ns = now
            if again:
                return
        relay.deaths += sorted(failure.workers) or ["a worker"]
        call, workers = relay.call, ", ".join(relay.deaths)
        _log.warning("request %s was under way when %s ended (%s)", call.wire_id, workers, failure)
        if len(relay.deaths) < MAX_DEATHS:
            return
        self._metrics.unfinished.labels("suspect").inc()
        _log.error("request %s is refused: %s ended with it under way", call.wire_id, workers)
        raise APIError(
            502,
            f"Request {call.wire_id} was under way when {len(relay.deaths)} workers ended "
            f"({workers}); it may be what ends them, and is not sent again. The gateway's log "
            "says more.",
            type=SUSPECT,
        )

    async def _route(self, call: Call, relay: Relay, tried: frozenset[str]) -> Route:
        if call.share is not None:
            # Further sequences of a request were accepted with its first one.
            later = call.group not in ("", call.id)
            await call.share.take(call.id, None if later else self._pilot.queue_timeout_s)
        request = call.request(len(relay.transcript.tokens))
        try:
            route = await self._pilot.route(request, tried)
        except ConfigError as error:
            raise refused(error) from error
        call.choice = route.choice
        if call.share is not None and not tried:
            call.share.sent()
        if call.on_route is not None:
            call.on_route(route.choice)
        why = self._pilot.plane.decision(call.id)
        computes = self._pilot.upstreams.get(route.choice.prefill or route.choice.decode)
        if why is not None and computes is not None:
            self._metrics.decided(why, computes.worker.block_size)
        return route

    def _upstream(self, worker: str) -> Upstream:
        found = self._pilot.upstreams.get(worker)
        if found is None:
            raise WorkerFailed("connect", f"{worker} is gone", frozenset({worker}))
        return found

    def _ordered(self, call: Call, engine: Engine, body: Body, route: Route) -> Body:
        """Return a body with what matters to the order inside a worker, as that understands it."""
        if call.deadline_ms is not None and self._pilot.heeds_deadlines:
            body = engine.dated(body, call.left_ms(time.monotonic_ns()))
        return engine.ranked(body, route.priority)

    async def _fetch(self, relay: Relay, tried: frozenset[str]) -> bytes:
        """One attempt at a reply that is not streamed."""
        call = relay.call
        route = await self._route(call, relay, tried)
        body = call.current(call.body, time.time_ns())
        body = await self._prefilled(call, route, call.path, body)
        decode = self._upstream(route.choice.decode)
        body = self._ordered(call, decode.engine, body, route)
        with decode.busy():
            reply = await decode.whole(call.path, body, call.wire_id, call.tenant)
        me = frozenset({decode.worker.id})
        try:
            found = whole(without_bom(reply))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise WorkerFailed("garbage", f"{decode.worker.id}: {error}", me) from error
        if any(choice.finish_reason in ("abort", "error") for choice in found.choices):
            raise WorkerFailed("abort", f"{decode.worker.id} gave the request up", me)
        if found.usage is not None:
            decode.tokens += found.usage.completion_tokens
            self._pilot.observe(Tokens(call.id, found.usage.completion_tokens))
            labels = call.tenant
            self._metrics.generation_tokens.labels(labels).inc(found.usage.completion_tokens)
            self._metrics.prompt_tokens.labels(labels).inc(found.usage.prompt_tokens)
            call.stats.add(found.usage.prompt_tokens, found.usage.completion_tokens)
        return reply if call.cached is None else with_cached_tokens(reply, call.cached)

    async def _prefilled(self, call: Call, route: Route, path: str, body: Body) -> Body:
        """Run leg 1 where the route has one; return the body for the decode worker."""
        read = await self._read(call, route, body)
        call.cached = None
        if route.choice.prefill is None:
            return body if read is None else leg_two(body, read)
        start = time.monotonic_ns()
        prefill = self._upstream(route.choice.prefill)
        leg = leg_one(body, chat=path != COMPLETIONS, read=read) | {"return_token_ids": False}
        leg = self._ordered(call, prefill.engine, leg, route)
        well = False
        try:
            with prefill.busy():
                reply = await prefill.whole(path, leg, call.wire_id, call.tenant)
            params = ticket(reply)
            call.cached = None if params is None else cached_tokens(reply)
            well = True
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            me = frozenset({prefill.worker.id})
            raise WorkerFailed("garbage", f"{prefill.worker.id}: {error}", me) from error
        finally:
            self._pilot.observe(PrefillDone(call.id, well))
        self._metrics.prefill.observe((time.monotonic_ns() - start) / SECOND)
        return body if params is None else leg_two(body, params)

    async def _read(self, call: Call, route: Route, body: Body) -> dict[str, Any] | None:
        """Ask another worker for what it has cached, where the route says so; return its ticket.

        Whatever goes wrong costs time alone: the prompt is computed.
        """
        read = route.choice.read
        if read is None:
            return None
        source = self._pilot.upstreams.get(read.worker)
        params, outcome = None, "gone"
        if source is not None:
            params, outcome = await lent(source, body, call.wire_id, read, call.tenant)
        if params is None:
            self._pilot.observe(ReadFailed(call.id))
        self._metrics.read(outcome, read)
        return params

    async def _relay(self, relay: Relay, tried: frozenset[str], outlet: Outlet) -> None:
        """One attempt at a stream, its first or a further one."""
        call, transcript = relay.call, relay.transcript
        if transcript.finish is not None and call.single:
            await outlet.write(closing(call, transcript))
            return
        route = await self._route(call, relay, tried)
        decode = self._upstream(route.choice.decode)
        engine = decode.engine
        if not can_resume(call, transcript, engine.stock):
            raise APIError(
                502,
                "The worker of this stream failed, and the stream cannot go on elsewhere: it "
                "has several choices, or depends on state that a stock worker does not resume.",
            )
        sent = sending(
            call, transcript, stock=engine.stock, seed=_seed(call),
            max_model_len=engine.max_model_len, dynamo=engine.dynamo,
        )  # fmt: skip
        if sent.body.get("max_tokens") == 0:
            await outlet.write(out_of_room(call, transcript) + closing(call, transcript))
            return
        body = call.current(sent.body, time.time_ns())
        body = await self._prefilled(call, route, sent.path, body)
        body = self._ordered(call, engine, body, route)
        relay.begin(stock=engine.stock, mapped=sent.mapped)
        with decode.busy():
            async with decode.stream(sent.path, body, call.wire_id, call.tenant) as line:
                await self._pump(relay, decode, line, outlet)

    async def _pump(self, relay: Relay, decode: Upstream, line: Line, outlet: Outlet) -> None:
        """Pass the worker's bytes on until the stream is done.

        Once the client has the head of its response, chunks pass within the call that receives
        them (`take`); the task only wakes when the client is slow, or at the end.
        """
        transcript = relay.transcript
        last = 0
        itl = self._metrics.itl.observe

        def feed(data: bytes) -> bytes:
            nonlocal last
            before = relay.counted
            out = relay.feed(data)
            now = time.monotonic_ns()
            count = relay.counted - before
            if count:
                decode.tokens += count
                if last:
                    itl((now - last) / count / SECOND, count)
                elif before == 0:
                    self._first_token(relay.call)
                last = now
            return out

        def take(data: bytes) -> bool:
            out = feed(data)
            room = not out or outlet.push(out)
            return room and relay.failed is None and not transcript.done

        while True:
            try:
                data = await line.read(take if outlet.fast else None)
            except LineError as error:
                raise decode.broke("broke", error) from error
            if data:
                out = feed(data)
                if out:
                    with decode.waiting():
                        await outlet.write(out)
            if relay.failed is not None:
                if isinstance(relay.failed, WorkerFailed):
                    relay.failed.workers = frozenset({decode.worker.id})
                    relay.failed.fate = decode.fate
                raise relay.failed
            if transcript.done:
                await _to_end(line)
                return
            if data == b"" and (out := relay.end()):
                await outlet.write(out)
                return
            if data == b"":
                raise decode.broke("broke", EOFError("the stream ended early"))
            if data is None:
                with decode.waiting():
                    await outlet.drain()

    def _first_token(self, call: Call) -> None:
        self._pilot.observe(FirstToken(call.id))
        now = time.monotonic_ns()
        call.stats.first_token = call.stats.first_token or now
        self._metrics.first_token.observe((now - call.arrival) / SECOND)


async def _to_end(line: Line) -> None:
    """Read what follows the last event, so that the connection can be kept."""
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(_END_S):
            while await line.read():
                pass


def _seed(call: Call) -> int:
    """Return the seed of a request whose client gave none: the same in every attempt."""
    return int(call.id, 16) & 0x7FFF_FFFF_FFFF_FFFF


def _surrender(failure: WorkerFailed) -> APIError:
    if failure.status == 503:
        message = "All workers that could serve this request are busy. Try again later."
        return APIError(503, message, retry_after=1)
    return APIError(502, f"No worker could finish this request; the last failure: {failure}.")
