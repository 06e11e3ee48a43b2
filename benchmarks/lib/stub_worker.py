"""A worker that answers at once and computes nothing: what is in front of it is what is measured.

Run as `python -m benchmarks.lib.stub_worker PORT`. It speaks HTTP/1.1 on raw sockets. A stream has
`max_tokens` chunks; `temperature` in the request is read as seconds between two of them
(0: as fast as they go).
"""

from __future__ import annotations

import asyncio
import json
import sys
from functools import cache
from typing import Any, cast

import uvloop

MODEL = "stub"
_CARDS = {"object": "list", "data": [{"id": MODEL, "owned_by": "pigou", "max_model_len": 1 << 20}]}
_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_FIXED = '{"id":"cmpl-1","object":"text_completion","created":1,"model":"stub","choices":[{"index":0,"text":" token","logprobs":null,"finish_reason":%s,"stop_reason":null,"prompt_token_ids":%s,"token_ids":%s}]}'  # noqa: E501


def sse(finish: str, prompt_ids: str, ids: str) -> bytes:
    """Return one chunk of the stream, framed as an event and as a chunk of HTTP."""
    event = f"data: {_FIXED % (finish, prompt_ids, ids)}\n\n".encode()
    return chunked(event)


def chunked(data: bytes) -> bytes:
    """Return data as one chunk of a chunked body."""
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


_END = chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n"


def plain(body: dict[str, Any]) -> bytes:
    """Return a whole JSON response."""
    data = json.dumps(body).encode()
    head = (
        f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


@cache
def prompt_json(tokens: int) -> str:
    """Return the ids of a prompt as JSON, made once: a stub's own work is not to be measured."""
    return json.dumps(list(range(1000, 1000 + tokens)), separators=(",", ":"))


class Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self._rest = b""
        self._transport: asyncio.Transport | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002
        """Stop answering."""
        for task in self._tasks:
            task.cancel()

    def data_received(self, data: bytes) -> None:
        """Answer once a request is complete."""
        self._rest += data
        end = self._rest.find(b"\r\n\r\n")
        if end < 0:
            return
        head = self._rest[:end].lower()
        at = head.find(b"content-length:")
        size = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        if len(self._rest) < end + 4 + size:
            return
        body = self._rest[end + 4 : end + 4 + size]
        self._rest = self._rest[end + 4 + size :]
        self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        assert self._transport is not None
        path = head.split(b" ", 2)[1]
        if path == b"/v1/models":
            self._transport.write(plain(_CARDS))
        elif not body:
            ok = path == b"/health"
            status = b"200 OK" if ok else b"404 Not Found"
            self._transport.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\n\r\n")
        else:
            task = asyncio.create_task(self._generate(json.loads(body)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _generate(self, body: dict[str, Any]) -> None:
        transport = self._transport
        assert transport is not None
        prompt = body.get("prompt", "")
        tokens = len(prompt) // (4 if isinstance(prompt, str) else 1)
        if not body.get("stream"):
            ticket = {"do_remote_prefill": True, "remote_block_ids": [list(range(tokens // 16))]}
            usage = {"prompt_tokens": tokens, "completion_tokens": 1, "total_tokens": tokens + 1}
            choice = {"index": 0, "text": " token", "finish_reason": "length"}
            transport.write(
                plain({"choices": [choice], "usage": usage, "kv_transfer_params": ticket})
            )
            return
        wants = bool(body.get("return_token_ids"))
        ids = "[1234]" if wants else "null"
        prompt_ids = prompt_json(tokens) if wants else "null"
        count, pause = int(body["max_tokens"]), float(body.get("temperature") or 0)
        middle = sse("null", "null", ids)
        transport.write(_HEAD + sse("null", prompt_ids, ids))
        due = asyncio.get_running_loop().time()
        for _ in range(count - 2):
            due += pause
            await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))
            transport.write(middle)
        transport.write(sse('"length"', "null", ids) * (count > 1) + _END)


async def main(port: int) -> None:
    """Serve until killed."""
    server = await asyncio.get_running_loop().create_server(Connection, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))
