"""Two attached servers in one process: vLLM's manners, hostile for prompts that ask for it.

`python -m tests.hostile.stub_server` prints the two `--attach` options, and ends with its stdin.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain
from typing import Any

import msgspec
import zmq
from tests.hostile.registry import LASTS_S
from tests.hostile.upstreams import PREFIX

STEP_S = 0.01
#: Seconds for which what is endless goes on, unless its connection is cut.
ENDLESS_S = 10.0
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
JSON = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
#: Seconds before a whole reply: several times the `--hang-timeout` of its fleet.
LATE_S = 7.0
LATE = (b'{"id":"x","object":"text_completion","created":1,"model":"stub","choices":[{"index":0,'
        b'"text":"late","finish_reason":"stop"}],"usage":{"prompt_tokens":1,"completion_tokens":1,'
        b'"total_tokens":2}}')  # fmt: skip
DEEP = b"[" * 200_000 + b"]" * 200_000
BLOCK = b"10000\r\n" + b"a" * 65_536 + b"\r\n"


def chunk(payload: bytes) -> bytes:
    """Return an event in a chunk of its own."""
    data = b"data: " + payload + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


def token(index: int, last: bool = False) -> bytes:
    """Return a completion's chunk with one token, as vLLM's."""
    choice = {"index": 0, "text": f" t{index}", "logprobs": None, "token_ids": [1000 + index],
              "finish_reason": "length" if last else None, "stop_reason": None}  # fmt: skip
    body = {"id": "cmpl-x", "object": "text_completion", "created": 1, "model": "stub"}
    return chunk(json.dumps(body | {"choices": [choice]}).encode())


def _completed(ids: list[int] | None) -> bytes:
    """Return a completion's chunk with these tokens."""
    choice = {"index": 0, "text": "x", "token_ids": ids, "finish_reason": None}
    return json.dumps({"id": "x", "created": 1, "model": "stub", "choices": [choice]}).encode()


def endless(block: bytes) -> Iterator[bytes]:
    """Yield a block until it has gone on for `ENDLESS_S`."""
    end = time.monotonic() + ENDLESS_S
    while time.monotonic() < end:
        yield block


DEEP_EVENT = chunk(b'{"choices":[],"x":' + DEEP + b"}")
DEEP_REPLY = b'{"choices":[],"x":' + DEEP + b"}"
TOKEN = token(0)
DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
MANY_TOKENS = json.dumps(
    {
        "id": "x",
        "created": 1,
        "model": "stub",
        "choices": [{"index": 0, "text": "x " * 400, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 400, "total_tokens": 401},
    }
).encode()
TINY = b"".join(b"1\r\n%b\r\n" % bytes([byte]) for byte in b"data: {}\n\n" * 2000)


#: What a server sends, by how it misbehaves.
HOSTILE: dict[str, Callable[[], Iterable[bytes]]] = {
    "endless_line": lambda: chain([HEAD], endless(BLOCK)),
    "endless_line_after_a_token": lambda: chain([HEAD, TOKEN], endless(BLOCK)),
    "endless_body": lambda: chain(
        [JSON + b"transfer-encoding: chunked\r\n\r\n"], endless(BLOCK.replace(b"a", b" "))
    ),
    "endless_head": lambda: chain([b"HTTP/1.1 200 OK\r\n"], endless(b"x-a: b\r\n" * 4096)),
    "endless_trailers": lambda: chain([HEAD, TOKEN, b"0\r\n"], endless(b"x-a: b\r\n" * 4096)),
    "huge_chunk": lambda: [HEAD, b"e8d4a51000\r\n" + b"a" * 65_536],
    "continues": lambda: [b"HTTP/1.1 100 Continue\r\n\r\n" * 3000],
    "deep_event": lambda: [HEAD, DEEP_EVENT],
    "deep_event_after_a_token": lambda: [HEAD, TOKEN, DEEP_EVENT],
    "deep_reply": lambda: [JSON + b"content-length: %d\r\n\r\n" % len(DEEP_REPLY), DEEP_REPLY],
    "tiny_chunks": lambda: [HEAD, TINY],
    "empty_events": lambda: chain([HEAD], endless(b"10\r\n: ping\n\n: ping\n\n\r\n" * 1000)),
    "declared_gigabyte": lambda: chain(
        [JSON + b"content-length: %d\r\n\r\n" % 2**30], endless(b" " * 65_536)
    ),
    "gigabyte": lambda: chain([JSON + b"transfer-encoding: chunked\r\n\r\n"], [BLOCK] * 2**14),
    "gigabyte_event": lambda: chain([HEAD, b"6\r\ndata: \r\n"], [BLOCK] * 2**14),
    "many_tokens": lambda: [HEAD, *map(token, range(400)), DONE],
    "many_tokens_at_once": lambda: [HEAD, chunk(_completed(list(range(400)))), DONE],
    "many_texts": lambda: [HEAD, *(chunk(_completed(None)) for _ in range(400)), DONE],
    "many_tokens_whole": lambda: [
        JSON + b"content-length: %d\r\n\r\n" % len(MANY_TOKENS),
        MANY_TOKENS,
    ],
    "line_break": lambda: [HEAD, TOKEN, chunk(b'{"choices":[],\ndata: "usage":{"x":1}}'), DONE],
    "cut_off": lambda: [HEAD, TOKEN[: len(TOKEN) // 2]],
}


def _asked_for(body: bytes) -> str:
    """Return how a request asks to misbehave on its own connection; empty for not at all."""
    how = body.partition(PREFIX.encode())[2].partition(b'"')[0].decode()
    return how if how in HOSTILE else ""


def _flood(descriptor: int, how: str) -> None:
    """Send what is hostile through a socket, as fast as it is taken, and close it."""
    with socket.socket(fileno=descriptor) as connection, suppress(OSError):
        connection.settimeout(ENDLESS_S)
        for piece in HOSTILE[how]():
            connection.sendall(piece)


class Server:
    """One server, with its publisher of KV events."""

    def __init__(self, context: zmq.Context) -> None:
        self._publisher = context.socket(zmq.PUB)
        self._publisher.setsockopt(zmq.LINGER, 0)
        self._events = self._publisher.bind_to_random_port("tcp://127.0.0.1")
        self._sequence = 0
        self._raves_until = 0.0

    async def start(self) -> str:
        """Listen; return the option that attaches it."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{port},events=tcp://127.0.0.1:{self._events}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                method, path, _ = head.split(b" ", 2)
                fields = dict(
                    line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if line
                )
                body = await reader.readexactly(int(fields.get(b"content-length", b"0")))
                if how := _asked_for(body):
                    # A thread, so that the healthy streams of this loop do not wait for it.
                    await asyncio.to_thread(
                        _flood, os.dup(writer.get_extra_info("socket").fileno()), how
                    )
                    break
                answer = self._completion(body) if method == b"POST" else self._page(path.decode())
                async for piece in answer:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            writer.close()

    async def _page(self, path: str) -> AsyncIterator[bytes]:
        card = {"id": "stub", "owned_by": "vllm", "max_model_len": 2048}
        pages = {"/v1/models": {"data": [card]}, "/version": {"version": "0.11.0"}, "/health": {}}
        if path == "/metrics":
            yield self._reply(200, self._metrics())
        elif path in pages:
            yield self._reply(200, json.dumps(pages[path]).encode())
        else:
            yield self._reply(404, b"{}")

    def _metrics(self) -> bytes:
        if time.monotonic() < self._raves_until:
            return (b"vllm:num_requests_running NaN\nvllm:num_requests_waiting -1e999\n"
                    b"vllm:kv_cache_usage_perc 1e999\n\xff\xfe\n"
                    + b"vllm:x{a=\"" + b"b" * 1_000_000 + b"\n")  # fmt: skip
        return (b"vllm:num_requests_running 0.0\nvllm:num_requests_waiting 0.0\n"
                b"vllm:kv_cache_usage_perc 0.1\n"
                b'vllm:cache_config_info{block_size="16",num_gpu_blocks="1000"} 1.0\n')  # fmt: skip

    def _reply(self, status: int, body: bytes) -> bytes:
        lines = f"HTTP/1.1 {status} X", "content-type: application/json"
        return "\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode() + body

    async def _completion(self, body: bytes) -> AsyncIterator[bytes]:
        wanted: dict[str, Any] = json.loads(body)
        prompt = wanted.get("prompt", "")
        how = prompt.partition(PREFIX)[2] if isinstance(prompt, str) else ""
        if how == "metrics":
            self._raves_until = time.monotonic() + LASTS_S
        elif how == "kv_events":
            await asyncio.to_thread(self._rave)
        elif how == "late":
            await asyncio.sleep(LATE_S)
            yield self._reply(200, LATE)
            return
        if how or not wanted.get("stream"):
            yield self._reply(400, b'{"error":{"message":"stub","type":"X","code":400}}')
            return
        yield HEAD
        count = wanted.get("max_tokens", 5)
        for index in range(count):
            await asyncio.sleep(STEP_S)
            yield token(index, last=index == count - 1)
        yield DONE

    def _rave(self) -> None:
        """Publish what is hostile, from a thread."""
        for payload in BATCHES:
            self._sequence += 1
            number = struct.pack(">q", self._sequence)
            self._publisher.send_multipart([b"kv", number, payload], copy=False)
        for frames in ([b"kv"], [b"kv", b"short", b"x"], [b"kv", b"\xff" * 8, b"x"], [b"kv"] * 9):
            self._publisher.send_multipart(frames)


def _stored(blocks: int, **fields: Any) -> dict[str, Any]:
    return {"type": "BlockStored", "block_hashes": list(range(blocks)), "parent_block_hash": None,
            "token_ids": [3] * 16 * blocks, "block_size": 16} | fields  # fmt: skip


def _batch(*events: Any) -> bytes:
    return msgspec.msgpack.encode([1.0, list(events)])


BATCHES = [
    _batch(_stored(200_000)),
    _batch(*[_stored(1)] * 20_000),
    _batch(_stored(1, medium={"a": 1})),
    _batch(_stored(1, token_ids=["x"] * 16)),
    _batch(_stored(1, block_size=0)),
    _batch(_stored(1, block_size=2**62)),
    _batch({"type": "BlockRemoved", "block_hashes": list(range(400_000))}),
    _batch({"type": "BlockRemoved", "block_hashes": [1.5]}),
    _batch(*[{"type": "AllBlocksCleared"}] * 100_000),
    b"\x91" * 200_000 + b"\xc0",
    b"\x92\xcb" + b"\0" * 8 + b"\xdd\xff\xff\xff\xff",
    msgspec.msgpack.encode([float("nan"), []]),
    b"\0" * (12 * 1024 * 1024),
    b"",
]


async def main() -> None:
    """Serve until stdin ends."""
    sys.setswitchinterval(0.0005)  # floods come from threads
    context = zmq.Context()
    for _ in range(2):
        print(await Server(context).start(), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    context.destroy(linger=0)


if __name__ == "__main__":
    asyncio.run(main())
