"""Requests that are many sequences, or that take long, in the front of others."""

from __future__ import annotations

import asyncio
import json
import socket
from collections import Counter
from contextlib import suppress
from functools import partial

from tests.hostile.registry import Target, again, attack, expect

#: Seconds; above the `--hang-timeout` and `--client-timeout` of the fleet that waits.
PATIENT_S = 20.0


async def _for_a_while(target: Target, body: dict[str, object], at_once: int = 4) -> None:
    """Send it, leave after a while, and send it again."""
    results = await again(partial(target.send, body, wait_s=1.0), at_once)
    expect(results, 0, 200, 429, 503)


@attack("sharing")
async def many_choices(target: Target) -> None:
    body = {"prompt": "a", "n": 128, "max_tokens": 200, "ignore_eos": True, "seed": 1}
    await _for_a_while(target, body)


@attack("sharing")
async def a_thousand_prompts(target: Target) -> None:
    body = {"prompt": ["a"] * 1000, "max_tokens": 100, "ignore_eos": True}
    await _for_a_while(target, body)


@attack("sharing")
async def a_thousand_prompts_streamed(target: Target) -> None:
    body = {"prompt": ["a"] * 1000, "max_tokens": 100, "ignore_eos": True, "stream": True}
    await _for_a_while(target, body)


@attack("sharing")
async def many_long_prompts(target: Target) -> None:
    body = {"prompt": [[5] * 1000] * 64, "max_tokens": 16, "ignore_eos": True}
    await _for_a_while(target, body)


@attack("sharing")
async def most_logprobs(target: Target) -> None:
    body = {"prompt": ["a"] * 16, "max_tokens": 200, "ignore_eos": True, "logprobs": 20}
    await _for_a_while(target, body | {"stream": True})


@attack("patience")
async def a_reply_beyond_the_hang_limit(target: Target) -> None:
    body = {"prompt": "a", "max_tokens": 400, "ignore_eos": True}
    status, reply = await target.ask(body, wait_s=PATIENT_S, whole=True)
    assert status == 200, reply
    assert b'"completion_tokens":400' in reply.replace(b" ", b"")


@attack("patience")
async def a_prefill_beyond_the_hang_limit(target: Target) -> None:
    body = {"prompt": [5] * 2000, "max_tokens": 2, "ignore_eos": True}
    expect(Counter([await target.send(body, wait_s=PATIENT_S)]), 200)


@attack("patience")
async def paused_readers(target: Target) -> None:
    body = {"prompt": "a", "n": 4, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    data = json.dumps(body | {"logprobs": 20}).encode()

    async def pause() -> bool:
        """Return whether the stream was cut."""
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, target.address)
        reader, writer = await target.connect(sock=sock, limit=1024)
        writer.write(target.head(len(data)).encode() + data)
        assert b" 200 " in await reader.readline()
        await asyncio.sleep(8)
        rest = b""
        with suppress(OSError):
            async with asyncio.timeout(60):
                rest = await reader.read()
        writer.close()
        return b"[DONE]" not in rest

    async with asyncio.timeout(PATIENT_S):
        cut = await asyncio.gather(*(pause() for _ in range(4)))
    assert all(cut), cut
