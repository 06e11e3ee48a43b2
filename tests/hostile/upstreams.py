"""Servers that answer with what is endless, or no answer; `stub_server.py` plays them."""

from __future__ import annotations

from functools import partial

from tests.hostile.registry import Target, again, attack, expect

#: Prompts that begin so ask the stub server to misbehave as the rest says.
PREFIX = "attack:"
#: 502: given up by the gateway. 200: its stream ended with an error event. 0: no answer in time.
_ENDED = (200, 502)


async def _ask(target: Target, how: str, stream: bool, *statuses: int) -> None:
    async def one() -> int:
        body = {"prompt": PREFIX + how, "max_tokens": 4, "stream": stream}
        status, reply = await target.ask(body, whole=True, wait_s=4.0)
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
