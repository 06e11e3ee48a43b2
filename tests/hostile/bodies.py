"""Bodies that cost more to read than to send."""

from __future__ import annotations

import gzip
import json
from functools import cache, partial

from tests.hostile.registry import Target, again, attack

_MILLION = 1_000_000


@cache
def _ids() -> bytes:
    return b'{"prompt":[' + b",".join([b"12345"] * (_MILLION * 10 // 6)) + b"]}"


@cache
def _zipped() -> bytes:
    return gzip.compress(b'{"prompt":"' + b"a" * 100 * _MILLION + b'"}')


@attack("bodies")
async def zipped_with_a_wrong_key(target: Target) -> None:
    await again(partial(target.send, _zipped(), "content-encoding: gzip", key="wrong"), 8)


@attack("bodies")
async def zipped(target: Target) -> None:
    await again(partial(target.send, _zipped(), "content-encoding: gzip"), 8)


@attack("bodies")
async def ten_megabytes_of_ids(target: Target) -> None:
    await again(partial(target.send, _ids()))


@attack("bodies")
async def ten_megabytes_with_a_wrong_key(target: Target) -> None:
    await again(partial(target.send, _ids(), key="wrong"))


@attack("bodies")
async def many_biases(target: Target) -> None:
    body = {"prompt": "a", "logit_bias": {str(i): 1 for i in range(100_000)}}
    await again(partial(target.send, json.dumps(body).encode()))


@attack("bodies")
async def many_messages(target: Target) -> None:
    body = {"messages": [{"role": "user", "content": "a"}] * 200_000}
    await again(partial(target.send, json.dumps(body).encode()))


@attack("bodies")
async def many_fields(target: Target) -> None:
    body = {"prompt": "a"} | {f"x{i}": i for i in range(200_000)}
    await again(partial(target.send, json.dumps(body).encode()))


@attack("bodies")
async def many_stops_and_tools(target: Target) -> None:
    body = {"prompt": "a", "stop": ["x"] * 100_000, "tools": [{}] * 100_000}
    await again(partial(target.send, json.dumps(body).encode()))


@attack("bodies")
async def many_prompts(target: Target) -> None:
    body = {"prompt": ["a"] * 100_000, "max_tokens": 1}
    await again(partial(target.send, json.dumps(body).encode()))


@attack("bodies")
async def deep(target: Target) -> None:
    await again(partial(target.send, b'{"prompt":' + b"[" * _MILLION + b"]" * _MILLION + b"}"))


@attack("bodies")
async def claimed_length(target: Target) -> None:
    async def claim() -> None:
        reader, writer = await target.connect()
        writer.write(target.head(10**12).encode())
        await reader.readline()
        writer.close()

    await again(claim)
