"""Connections that are held, cut and trickled."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from tests.hostile.registry import LASTS_S, MOST, Target, again, attack

_BODY = b'{"prompt":"a","max_tokens":4,"stream":true}'


async def _hold(target: Target, data: bytes) -> None:
    held = [await target.connect() for _ in range(MOST)]
    for _, writer in held:
        writer.write(data)
    await asyncio.sleep(LASTS_S)
    for _, writer in held:
        writer.close()


@attack("connections")
async def silent(target: Target) -> None:
    await _hold(target, b"")


@attack("connections")
async def half_a_head(target: Target) -> None:
    await _hold(target, b"POST /v1/completions HTTP/1.1\r\nhost: local")


@attack("connections")
async def half_a_body(target: Target) -> None:
    await _hold(target, target.head(1000).encode() + b"{")


@attack("connections")
async def half_a_body_with_a_wrong_key(target: Target) -> None:
    await _hold(target, target.head(1000, key="wrong").encode() + b"{")


@attack("connections")
async def byte_by_byte(target: Target) -> None:
    async def trickle() -> None:
        _, writer = await target.connect()
        with suppress(OSError):
            for byte in target.head(len(_BODY)).encode() + _BODY:
                writer.write(bytes([byte]))
                await asyncio.sleep(0.001)
        writer.close()

    await again(trickle, 16)


@attack("connections")
async def cut_streams(target: Target) -> None:
    async def cut() -> None:
        reader, writer = await target.connect()
        writer.write(target.head(len(_BODY)).encode() + _BODY)
        with suppress(OSError):
            await reader.readline()
        writer.transport.abort()

    await again(cut)


@attack("connections")
async def half_closed_and_old(target: Target) -> None:
    async def old() -> None:
        reader, writer = await target.connect()
        head = target.head(len(_BODY), "connection: keep-alive", version="1.0")
        writer.write(head.encode() + _BODY)
        writer.write_eof()
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(LASTS_S):
                await reader.read()
        writer.close()

    await again(old)


@attack("connections")
async def pipelined(target: Target) -> None:
    async def many() -> None:
        reader, writer = await target.connect()
        writer.write(b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n" * 1000)
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(LASTS_S):
                await reader.readexactly(10_000)
        writer.close()

    await again(many)


@attack("connections")
async def huge_queries_and_headers(target: Target) -> None:
    async def huge() -> None:
        reader, writer = await target.connect()
        with suppress(OSError):
            writer.write(b"GET /version?" + b"a=b&" * 50_000 + b" HTTP/1.1\r\nhost: a\r\n\r\n")
            await reader.read(100)
        writer.close()

    await again(huge)
