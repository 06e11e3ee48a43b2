"""A request of several sequences (`n`, a list of prompts), served as one request for each.

Each sequence is admitted, charged, routed and retried by itself. So a few run at a time, and
others get their turn; and each of them goes on elsewhere when its worker fails.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from pigou.control.messages import Choice, GroupEnded
from pigou.gateway.plane_driver import PlaneDriver
from pigou.gateway.proxy.writer import HIGH_WATER, SSEWriter
from pigou.gateway.request import GatewayRequest
from pigou.wire.errors import bad_request
from pigou.wire.sse import DONE, DONE_PAYLOAD, Reader, frame

#: Most sequences that one request may ask for.
MAX_SEQUENCES = 1024
#: Fields under which the sequences of a request depend on each other; their neutral values.
_COUPLING_FIELDS: dict[str, tuple[Any, ...]] = {
    "use_beam_search": (None, False),
    "best_of": (None, 1),
}
_DETAILS, _CACHED = "prompt_tokens_details", "cached_tokens"
#: Characters of a request id that are kept before a sequence's number.
_ID = 240


def splits(call: GatewayRequest) -> bool:
    """Whether a request is served as one request for each of its sequences.

    Raises:
        APIError: 400, it asks for more than `MAX_SEQUENCES`.
    """
    total = call.choices * len(call.prompts)
    if total > MAX_SEQUENCES:
        raise bad_request(
            f"prompt and n ask for {total} sequences; at most {MAX_SEQUENCES} work in one "
            "request: send several requests.",
            "prompt" if len(call.prompts) > 1 else "n",
        )
    return total > 1 and all(
        _value(call.body.get(name)) in (*neutral, *((call.choices,) if name == "best_of" else ()))
        for name, neutral in _COUPLING_FIELDS.items()
    )


@dataclass(eq=False, slots=True)
class _Sequence:
    """One sequence under way; `routed` is set once it has workers, or is over."""

    call: GatewayRequest
    index: int
    routed: asyncio.Event


#: Serves one sequence.
Serve = Callable[[GatewayRequest, int], Awaitable[None]]


class Sequences:
    """Serves the sequences of one request, a few at a time.

    The choices of one prompt follow once the prompt is computed for the first of them: then they
    find its blocks in the cache.
    """

    def __init__(self, plane_driver: PlaneDriver, call: GatewayRequest) -> None:
        self._plane_driver = plane_driver
        self._call = call
        self._total = call.choices * len(call.prompts)
        self._first = deque(range(0, self._total, call.choices))
        self._next: deque[int] = deque()
        self._leaders: dict[int, GatewayRequest] = {}
        self._active: dict[int, _Sequence] = {}
        self._wake = asyncio.Event()

    async def run(self, serve: Serve) -> None:
        """Serve them all.

        Raises:
            APIError, Rejected: the first failure of any; the others are ended.
        """
        if self._call.trace is not None:
            self._call.trace.begin_branches()
        try:
            with self._plane_driver.woken(self._wake):
                async with asyncio.TaskGroup() as tasks:
                    for sent in range(1, self._total + 1):
                        index = await self._turn()
                        sequence = self._begin(index, self._total - sent)
                        tasks.create_task(self._one(sequence, serve))
                        await sequence.routed.wait()  # one of them waits for a worker at a time
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures
        finally:
            self._plane_driver.observe(GroupEnded(self._call.id))
            if self._call.trace is not None:
                self._call.trace.end_branches("choices")

    def wake(self) -> None:
        """Let `run` look whether the next sequence may go."""
        self._wake.set()

    async def _turn(self) -> int:
        """Wait until another sequence may go; return its number."""
        while True:
            self._follow()
            waiting = self._next or self._first
            if waiting and self._plane_driver.may_add(self._call, len(self._active)):
                return waiting.popleft()
            self._wake.clear()
            await self._wake.wait()

    def _follow(self) -> None:
        """Let the other choices go of prompts that are computed."""
        for index, leader in list(self._leaders.items()):
            if index not in self._active or not self._plane_driver.plane.computes(leader.id):
                del self._leaders[index]
                self._next.extend(range(index + 1, index + self._call.choices))

    def _begin(self, index: int, held: int) -> _Sequence:
        routed = asyncio.Event()

        def on_route(choice: Choice) -> None:
            if self._call.choice is None and self._call.on_route is not None:
                self._call.on_route(choice)
            self._call.choice = self._call.choice or choice
            routed.set()

        prompts = -(-held // self._call.choices)  # those of the other choices are cached
        call = one_of(self._call, index)
        call.held, call.held_tokens = held, prompts * call.prompt
        call.on_route = on_route
        if self._call.choices > 1 and index % self._call.choices == 0:
            self._leaders[index] = call
        sequence = self._active[index] = _Sequence(call, index, routed)
        return sequence

    async def _one(self, sequence: _Sequence, serve: Serve) -> None:
        call, above = sequence.call, self._call.trace
        if above is not None:
            call.trace = above.branch()
        try:
            await self._plane_driver.read(call)
            await serve(call, sequence.index)
        finally:
            if above is not None and call.trace is not None:
                above.end_branch(call.trace, "choice", (("pigou.choice",), (sequence.index,)))
            del self._active[sequence.index]
            sequence.routed.set()
            self._wake.set()


def one_of(call: GatewayRequest, index: int) -> GatewayRequest:
    """Return sequence `index` of a request as a request of its own.

    Choice j of a seeded request is what the same request yields with seed + j.
    """
    prompt_index, sample = divmod(index, call.choices)
    prompt = call.prompts[prompt_index]
    body = {name: value for name, value in call.body.items() if name not in ("n", "best_of")}
    changes: dict[str, Any] = {"n": 1}
    if prompt is not None:
        body["prompt"] = changes["prompt"] = prompt
    if call.fields.seed is not None:
        body["seed"] = changes["seed"] = call.fields.seed + sample
    return replace(
        call,
        id=secrets.token_hex(16) if index else call.id,
        wire_id=f"{call.wire_id[:_ID]}-{index}",
        body=body,
        prompt=max(1, call.prompt // len(call.prompts)),
        single=True,
        splits=not call.fields.scores_prompt(call.chat),
        fields=msgspec.structs.replace(call.fields, **changes),
        arrival=time.monotonic_ns() if index else call.arrival,
        choices=1,
        prompts=(prompt,),
        group=call.id,
        choice=None,
        keys={},
    )


async def whole(
    plane_driver: PlaneDriver,
    call: GatewayRequest,
    serve: Callable[[GatewayRequest], Awaitable[bytes]],
) -> bytes:
    """Return the JSON body of a reply with all choices, `serve` being that of one sequence."""
    replies: dict[int, dict[str, msgspec.Raw]] = {}

    async def one(sequence: GatewayRequest, index: int) -> None:
        replies[index] = msgspec.json.decode(await serve(sequence), type=dict[str, msgspec.Raw])

    await Sequences(plane_driver, call).run(one)
    usage = UsageSum(call.choices)
    choices: list[dict[str, Any]] = []
    for index in sorted(replies):
        reply = replies[index]
        usage.add(index, _value(reply.get("usage")))
        own = msgspec.json.decode(reply.pop("choices", b"[]"), type=list[dict[str, msgspec.Raw]])
        choices += [choice | {"index": index} for choice in own]
    first = replies[0]
    body = first | {"id": _common(_value(first.get("id")), call, 0), "choices": choices}
    return msgspec.json.encode(body | ({"usage": usage.total} if usage.total else {}))


async def stream(
    plane_driver: PlaneDriver,
    call: GatewayRequest,
    writer: SSEWriter,
    serve: Callable[[GatewayRequest, SSEWriter], Awaitable[None]],
) -> None:
    """Stream all choices to `writer`, `serve` being that of one sequence."""
    sequences, merged = Sequences(plane_driver, call), _MergedStream(call, writer)

    async def one(sequence: GatewayRequest, index: int) -> None:
        await serve(sequence, _SequenceWriter(merged, index, sequences.wake))

    await sequences.run(one)
    await writer.write(merged.end())


class UsageSum:
    """Adds the usage of sequences up; a prompt counts once, whatever its choices.

    Attributes:
        total: of all that were added; empty while there was none.
    """

    def __init__(self, choices: int) -> None:
        self.total: dict[str, Any] = {}
        self._choices = choices

    def add(self, index: int, usage: dict[str, Any] | None) -> None:
        """Add what the reply of sequence `index` said."""
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

    def __init__(self, call: GatewayRequest, writer: SSEWriter) -> None:
        self.call = call
        self.writer = writer
        self.usage = UsageSum(call.choices)
        self._head: dict[str, Any] = {}
        self._last: dict[str, Any] | None = None
        self._writing = asyncio.Lock()  # the first write sends the head

    async def write(self, frames: bytes) -> None:
        """Send whole frames; waits while the client is slow."""
        async with self._writing:
            await self.writer.write(frames)

    def fit(self, payload: bytes, index: int) -> bytes:
        """Return a chunk of sequence `index` for the client; empty for its usage."""
        body: dict[str, Any] = msgspec.json.decode(payload)
        if not self._head:
            names = ("created", "model")
            self._head = {name: body[name] for name in names if name in body}
            self._head["id"] = _common(body.get("id"), self.call, index)
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
    """The writer of one sequence: its chunks become those of one choice of the reply."""

    def __init__(self, merged: _MergedStream, index: int, on_begin: Callable[[], None]) -> None:
        self._merged, self._index, self._on_begin = merged, index, on_begin
        self._reader = Reader()
        self._begun = False

    @property
    def open(self) -> bool:
        """Whether the client has got anything."""
        return self._merged.writer.open

    @property
    def fast(self) -> bool:
        """Chunks have to be rewritten."""
        return False

    async def write(self, data: bytes) -> None:
        """Send whole SSE frames; waits while the client is slow."""
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


def _common(id_: Any, call: GatewayRequest, index: int) -> Any:
    """Return the reply's id for the id of sequence `index`."""
    if not isinstance(id_, str):
        return id_
    return id_.replace(f"{call.wire_id[:_ID]}-{index}", call.wire_id, 1)


def _value(raw: Any) -> Any:
    return msgspec.json.decode(raw) if isinstance(raw, msgspec.Raw) else raw
