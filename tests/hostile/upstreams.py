"""Servers that answer with what is endless, or no answer; `stub_server.py` plays them."""

from __future__ import annotations

import asyncio
from functools import partial

from tests.hostile.registry import Target, again, attack, expect

#: Prompts that begin so ask the stub server to misbehave as the rest says.
PREFIX = "attack:"
#: 502: given up by the gateway. 200: its stream ended with an error event. 0: no answer in time.
_ENDED = (200, 502)


def _body(how: str, stream: bool) -> dict[str, object]:
    return {"prompt": PREFIX + how, "max_tokens": 4, "stream": stream}


async def _at_once(target: Target, how: str, stream: bool) -> None:
    """Ask eight times at once for what no memory holds, and wait for the end."""
    asking = (target.ask(_body(how, stream), whole=True, wait_s=22.0) for _ in range(8))
    for status, reply in await asyncio.gather(*asking):
        assert status in (0, 200, 502), (status, reply[-300:])
        assert status != 200 or b'"error"' in reply, reply[-300:]


async def _ask(target: Target, how: str, stream: bool, *statuses: int) -> None:
    async def one() -> int:
        status, reply = await target.ask(_body(how, stream), whole=True, wait_s=4.0)
        assert status != 200 or b'"error"' in reply, reply[-300:]
        return status

    expect(await again(one), *statuses)


@attack("upstreams")
async def endless_line(target: Target) -> None:
    await _ask(target, "endless_line", True, 0, *_ENDED)


@attack("upstreams")
async def endless_line_after_a_token(target: Target) -> None:
    await _ask(target, "endless_line_after_a_token", True, 0, *_ENDED)


@attack("upstreams")
async def endless_body(target: Target) -> None:
    await _ask(target, "endless_body", False, 0, 502)


@attack("upstreams")
async def eight_gigabytes(target: Target) -> None:
    await _at_once(target, "gigabyte", False)


@attack("upstreams")
async def eight_declared_gigabytes(target: Target) -> None:
    await _at_once(target, "declared_gigabyte", False)


@attack("upstreams")
async def eight_events_of_a_gigabyte(target: Target) -> None:
    await _at_once(target, "gigabyte_event", True)


@attack("upstreams")
async def more_tokens_than_asked_for(target: Target) -> None:
    for how in ("many_tokens", "many_tokens_at_once", "many_texts"):
        status, reply = await target.ask(_body(how, True), whole=True)
        assert reply.count(b'"text"') <= 4 + 2, (how, status, reply[-500:])
        assert status == 502 or b"[DONE]" in reply, (how, status, reply[-500:])
    await _ask(target, "many_tokens_whole", False, 502)


@attack("upstreams")
async def line_break(target: Target) -> None:
    status, reply = await target.ask(_body("line_break", True), whole=True)
    assert b'{"choices":[],\n' not in reply, (status, reply)
    assert b'"error"' in reply or b"[DONE]" in reply


@attack("still")
async def whole_replies_beyond_the_hang_limit(target: Target) -> None:
    asking = (target.ask(_body("late", False), whole=True, wait_s=20.0) for _ in range(4))
    for status, reply in await asyncio.gather(*asking):
        assert (status, b'"late"' in reply) == (200, True), reply[-300:]


@attack("upstreams")
async def endless_head(target: Target) -> None:
    await _ask(target, "endless_head", True, 502)


@attack("upstreams")
async def endless_trailers(target: Target) -> None:
    await _ask(target, "endless_trailers", True, *_ENDED)


@attack("upstreams")
async def huge_chunk(target: Target) -> None:
    await _ask(target, "huge_chunk", True, *_ENDED)


@attack("upstreams")
async def continues(target: Target) -> None:
    await _ask(target, "continues", True, 502)


@attack("upstreams")
async def deep_event(target: Target) -> None:
    await _ask(target, "deep_event", True, *_ENDED)


@attack("upstreams")
async def deep_event_after_a_token(target: Target) -> None:
    await _ask(target, "deep_event_after_a_token", True, *_ENDED)


@attack("upstreams")
async def deep_reply(target: Target) -> None:
    await _ask(target, "deep_reply", False, 502)


@attack("upstreams")
async def tiny_chunks(target: Target) -> None:
    body = {"prompt": PREFIX + "tiny_chunks", "stream": True}
    await again(partial(target.ask, body, whole=True, wait_s=2.0))


@attack("upstreams")
async def empty_events(target: Target) -> None:
    body = {"prompt": PREFIX + "empty_events", "stream": True}
    await again(partial(target.ask, body, whole=True, wait_s=2.0))


@attack("upstreams")
async def cut_off(target: Target) -> None:
    await _ask(target, "cut_off", True, *_ENDED)


@attack("upstreams")
async def hostile_metrics(target: Target) -> None:
    await again(partial(target.send, {"prompt": PREFIX + "metrics"}))


@attack("upstreams")
async def hostile_kv_events(target: Target) -> None:
    await again(partial(target.send, {"prompt": PREFIX + "kv_events"}), 1)
