"""Requests of several sequences (`n`, a list of prompts), served as one request each.

Each sequence is admitted, routed, charged and retried by itself.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import msgspec

from pigou.control.messages import Choice, GroupEnded
from pigou.gateway.metrics import Metrics
from pigou.gateway.plane_driver import PlaneDriver
from pigou.gateway.proxy.driver import ReplyDriver, StreamDriver
from pigou.gateway.proxy.relay import Relay
from pigou.gateway.proxy.writer import HIGH_WATER, SSEWriter
from pigou.gateway.request import GatewayRun
from pigou.wire.errors import bad_request
from pigou.wire.sse import DONE, DONE_PAYLOAD, Reader, frame

#: Most sequences that one request may ask for.
MAX_SEQUENCES = 1024
_DETAILS, _CACHED = "prompt_tokens_details", "cached_tokens"
#: Characters of a request id that are kept before a sequence's number.
_ID = 240
#: Serves one sequence.
Serve = Callable[[GatewayRun, int], Awaitable[None]]


def splits(run: GatewayRun) -> bool:
    """True if sequences are served one by one; raise `APIError` 400 for too many."""
    total = run.parsed.sequences
    if total > MAX_SEQUENCES:
        raise bad_request(
            f"prompt and n ask for {total} sequences; at most {MAX_SEQUENCES} work in one "
            "request: send several requests.",
            "prompt" if len(run.parsed.prompts) > 1 else "n",
        )
    # Under beam search and best_of the sequences depend on each other.
    return (
        total > 1
        and _value(run.body.get("use_beam_search")) in (None, False)
        and _value(run.body.get("best_of")) in (None, 1, run.parsed.choices)
    )


class Sequences:
    """Serves a request's sequences, a few at a time; later choices hit the first's prompt."""

    def __init__(self, plane_driver: PlaneDriver, run: GatewayRun) -> None:
        self._plane_driver, self._run = plane_driver, run
        self._choices, self._total = run.parsed.choices, run.parsed.sequences
        self._first = deque(range(0, self._total, self._choices))
        self._next: deque[int] = deque()
        self._leaders: dict[int, str] = {}  # ids of prompts' first sequences, by number
        # under way; the event is set once the sequence has workers, or is over.
        self._routed: dict[int, asyncio.Event] = {}
        self._wake = asyncio.Event()

    async def serve(self, serve: Serve) -> None:
        """Serve all sequences; after a failure end the others, then raise it."""
        trace = self._run.trace
        if trace is not None:
            trace.begin_branches()
        try:
            with self._plane_driver.woken(self._wake):
                async with asyncio.TaskGroup() as tasks:
                    for sent in range(1, self._total + 1):
                        index = await self._next_index()
                        run, routed = self._begin(index, self._total - sent)
                        tasks.create_task(self._serve_one(run, index, serve))
                        await routed.wait()  # one of them waits for a worker at a time
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures
        finally:
            self._plane_driver.observe(GroupEnded(self._run.parsed.id))
            if trace is not None:
                trace.end_branches("choices")

    def wake(self) -> None:
        """Check whether the next sequence may start."""
        self._wake.set()

    async def _next_index(self) -> int:
        while True:
            for index, leader in list(self._leaders.items()):
                # The other choices follow a prompt that is computed.
                if index not in self._routed or not self._plane_driver.plane.computes(leader):
                    del self._leaders[index]
                    self._next.extend(range(index + 1, index + self._choices))
            waiting = self._next or self._first
            if waiting and self._plane_driver.may_add(self._run, len(self._routed)):
                return waiting.popleft()
            self._wake.clear()
            await self._wake.wait()

    def _begin(self, index: int, held: int) -> tuple[GatewayRun, asyncio.Event]:
        whole, routed = self._run, asyncio.Event()

        def on_route(choice: Choice) -> None:
            if whole.choice is None and whole.on_route is not None:
                whole.on_route(choice)
            whole.choice = whole.choice or choice
            routed.set()

        prompts = -(-held // self._choices)  # those of the other choices are cached
        run = one_of(whole, index)
        run.held, run.held_tokens = held, prompts * run.prompt_tokens
        run.on_route = on_route
        if self._choices > 1 and index % self._choices == 0:
            self._leaders[index] = run.parsed.id
        self._routed[index] = routed
        return run, routed

    async def _serve_one(self, run: GatewayRun, index: int, serve: Serve) -> None:
        above = self._run.trace
        if above is not None:
            run.trace = above.branch()
        try:
            await self._plane_driver.read(run)
            await serve(run, index)
        finally:
            if above is not None and run.trace is not None:
                above.end_branch(run.trace, "choice", (("pigou.choice",), (index,)))
            self._routed.pop(index).set()
            self._wake.set()


def one_of(run: GatewayRun, index: int) -> GatewayRun:
    """Return sequence `index` as a request of its own; choice j has seed + j."""
    parsed = run.parsed
    prompt_index, sample = divmod(index, parsed.choices)
    prompt = parsed.prompts[prompt_index]
    body = {name: value for name, value in run.body.items() if name not in ("n", "best_of")}
    changes: dict[str, Any] = {"n": 1}
    if prompt is not None:
        body["prompt"] = changes["prompt"] = prompt
    if parsed.fields.seed is not None:
        body["seed"] = changes["seed"] = parsed.fields.seed + sample
    one = replace(
        parsed,
        id=secrets.token_hex(16) if index else parsed.id,
        wire_id=f"{parsed.wire_id[:_ID]}-{index}",
        body=body,
        prompt_tokens=max(1, run.prompt_tokens // len(parsed.prompts)),
        single=True,
        splits=not parsed.fields.scores_prompt(parsed.chat),
        fields=msgspec.structs.replace(parsed.fields, **changes),
        arrival=time.monotonic_ns() if index else parsed.arrival,
        choices=1,
        prompts=(prompt,),
        group=parsed.id,
    )
    return replace(
        run, parsed=one, body=body, prompt_tokens=one.prompt_tokens, choice=None, keys={}
    )


async def whole(plane_driver: PlaneDriver, run: GatewayRun, metrics: Metrics) -> bytes:
    """Return the JSON body with all choices."""
    replies: dict[int, dict[str, msgspec.Raw]] = {}

    async def one(sequence: GatewayRun, index: int) -> None:
        reply = await ReplyDriver(plane_driver, metrics, Relay(sequence)).drive()
        replies[index] = msgspec.json.decode(reply, type=dict[str, msgspec.Raw])

    await Sequences(plane_driver, run).serve(one)
    usage = UsageSum(run.parsed.choices)
    choices: list[dict[str, Any]] = []
    for index in sorted(replies):
        reply = replies[index]
        usage.add(index, _value(reply.get("usage")))
        own = msgspec.json.decode(reply.pop("choices", b"[]"), type=list[dict[str, msgspec.Raw]])
        choices += [choice | {"index": index} for choice in own]
    first = replies[0]
    body = first | {"id": _common(_value(first.get("id")), run, 0), "choices": choices}
    return msgspec.json.encode(body | ({"usage": usage.total} if usage.total else {}))


async def stream(
    plane_driver: PlaneDriver, run: GatewayRun, metrics: Metrics, writer: SSEWriter
) -> None:
    """Stream all choices to `writer`."""
    sequences, merged = Sequences(plane_driver, run), _MergedStream(run, writer)

    async def one(sequence: GatewayRun, index: int) -> None:
        own_writer = _SequenceWriter(merged, index, sequences.wake)
        await StreamDriver(plane_driver, metrics, Relay(sequence), own_writer).drive()

    await sequences.serve(one)
    await writer.write(merged.end())


class UsageSum:
    """Sums the usage of sequences; a prompt counts once for all its choices."""

    def __init__(self, choices: int) -> None:
        self.total: dict[str, Any] = {}
        self._choices = choices

    def add(self, index: int, usage: dict[str, Any] | None) -> None:
        """Add the usage of sequence `index`."""
        if usage is None:
            return
        total, leads = self.total, index % self._choices == 0
        for name in ("prompt_tokens", "completion_tokens"):
            more = usage.get(name) or 0
            total[name] = total.get(name, 0) + (more if leads or name[0] == "c" else 0)
        total["total_tokens"] = total["prompt_tokens"] + total["completion_tokens"]
        details = usage.get(_DETAILS)
        if leads and isinstance(details, dict):
            known = total.setdefault(_DETAILS, {_CACHED: 0})
            known[_CACHED] += details.get(_CACHED) or 0


class _MergedStream:
    """One stream for the client, merged from the chunks of all sequences."""

    def __init__(self, run: GatewayRun, writer: SSEWriter) -> None:
        self.run = run
        self.writer = writer
        self.usage = UsageSum(run.parsed.choices)
        self._head: dict[str, Any] = {}
        self._last: dict[str, Any] | None = None
        self._writing = asyncio.Lock()  # the first write sends the head

    async def write(self, frames: bytes) -> None:
        """Send whole frames; waits for a slow client."""
        async with self._writing:
            await self.writer.write(frames)

    def fit(self, payload: bytes, index: int) -> bytes:
        """Return a chunk of sequence `index` for the client; empty for usage."""
        body: dict[str, Any] = msgspec.json.decode(payload)
        if not self._head:
            names = ("created", "model")
            self._head = {name: body[name] for name in names if name in body}
            self._head["id"] = _common(body.get("id"), self.run, index)
        body |= self._head
        if not body.get("choices"):
            self.usage.add(index, body.get("usage"))
            self._last = body
            return b""
        for choice in body["choices"]:
            choice["index"] = index
        return frame(msgspec.json.encode(body))

    def end(self) -> bytes:
        """Return the frames that end the stream."""
        if self._last is None:
            return DONE
        return frame(msgspec.json.encode(self._last | {"usage": self.usage.total})) + DONE


class _SequenceWriter(SSEWriter):
    """Writer of one sequence, whose chunks become one choice of the reply."""

    def __init__(self, merged: _MergedStream, index: int, on_begin: Callable[[], None]) -> None:
        self._merged, self._index, self._on_begin = merged, index, on_begin
        self._reader = Reader()
        self._begun = False

    @property
    def open(self) -> bool:
        """True if the client received anything."""
        return self._merged.writer.open

    @property
    def fast(self) -> bool:
        """False: chunks must be rewritten."""
        return False

    async def write(self, data: bytes) -> None:
        """Send whole SSE frames; waits for a slow client."""
        payloads = [payload for payload in self._reader.feed(data) if payload != DONE_PAYLOAD]
        frames = b"".join(self._merged.fit(payload, self._index) for payload in payloads)
        if not self._begun:
            self._begun = True
            self._on_begin()
        if frames:
            await self._merged.write(frames)

    async def drain(self, max_waiting_bytes: int = HIGH_WATER) -> None:
        """Wait until the client has taken enough."""
        await self._merged.writer.drain(max_waiting_bytes)


def _common(id_: Any, run: GatewayRun, index: int) -> Any:
    """Return the reply's id for the id of sequence `index`."""
    if not isinstance(id_, str):
        return id_
    return id_.replace(f"{run.parsed.wire_id[:_ID]}-{index}", run.parsed.wire_id, 1)


def _value(raw: Any) -> Any:
    return msgspec.json.decode(raw) if isinstance(raw, msgspec.Raw) else raw
