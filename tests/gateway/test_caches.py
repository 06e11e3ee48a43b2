"""Caches above the engine: within tenure, fresh, and replayed as the fleet would answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import aiohttp
from tests.gateway.stub import Fleet, Stub, serving

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
GREEDY: dict[str, Any] = {"max_tokens": 4, "temperature": 0}
MESSAGES = [{"role": "user", "content": "Hi"}]


async def ask(
    fleet: Fleet, path: str = CHAT, headers: Mapping[str, str] | None = None, **body: Any
) -> tuple[int, str, Any]:
    """Return status, cache header and body; a stream as its chunks."""
    prompt = {"messages": MESSAGES} if path == CHAT else {"prompt": "Hi"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(fleet.url + path, json=prompt | GREEDY | body, headers=headers) as reply,
    ):
        said = reply.headers.get("x-pigou-cache", "")
        if not body.get("stream") or reply.status != 200:
            return reply.status, said, await reply.json()
        data = (await reply.read()).decode()
        events = [event[6:] for event in data.split("\n\n") if event]
        assert events.pop() == "[DONE]"
        return reply.status, said, [json.loads(event) for event in events]


def text(reply: Any) -> str:
    """Return the text of a reply, whole or in chunks."""
    parts = reply if isinstance(reply, list) else [reply]
    choices = [choice for part in parts for choice in part["choices"]]
    texts = [c.get("text") or (c.get("delta") or c.get("message") or {}).get("content")
             for c in choices]  # fmt: skip
    return "".join(text or "" for text in texts)


async def test_a_repeated_request_is_answered_alike_whole_and_streamed_without_a_worker() -> None:
    stub = Stub("w")
    async with serving(stub, caches=("answer=1MiB",)) as fleet:
        for path in (TEXT, CHAT):
            for first in (False, True):
                body = {"seed": int(first)}
                _, said, computed = await ask(fleet, path, stream=first, **body)
                assert said == "miss"
                before = len(stub.seen)
                for stream in (False, True):
                    options = {"stream_options": {"include_usage": True}} if stream else {}
                    _, said, reply = await ask(fleet, path, stream=stream, **body, **options)
                    assert said == "hit"
                    assert text(reply) == text(computed) == " t0 t1 t2"
                    usage = (reply[-1] if stream else reply)["usage"]
                    assert usage["completion_tokens"] == 4
                    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"]
                assert len(stub.seen) == before
