"""Asking for what a worker has cached: whatever it answers, or not, the request goes on."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from pigou.control.messages import RemoteKVFetch
from pigou.gateway.proxy.upstream import Engine, Upstream, fetch_kv
from pigou.lifecycle.messages import FetchKV
from pigou.request import Worker

#: A read, by the seconds that its answer is waited for.
READS = {timeout_s: RemoteKVFetch("w", 160, 160, 0.01, timeout_s) for timeout_s in (0.2, 30.0)}


def ask(answer: Any, body: dict[str, Any], *, gone: bool = False) -> tuple[Any, str, list[Any]]:
    """Return what came of asking a worker that answers so, and the bodies that it got."""
    seen: list[Any] = []

    async def offer(request: web.Request) -> web.Response:
        seen.append(await request.json())
        if answer == "late":
            await asyncio.sleep(30)
        status, data = answer if isinstance(answer, tuple) else (200, answer)
        return web.Response(status=status, body=data, content_type="application/json")

    read = READS[0.2 if answer == "late" else 30.0]

    async def main() -> tuple[Any, str]:
        app = web.Application()
        app.router.add_post("/v1/kv/offer", offer)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        upstream = Upstream(Worker("w", f"http://127.0.0.1:{port}"), Engine())
        if gone:
            await upstream.close()
        try:
            return await fetch_kv(upstream, body, "id", FetchKV(1, read))
        finally:
            await upstream.close()
            await runner.cleanup()

    params, outcome = asyncio.run(main())
    return params, outcome, seen


@pytest.mark.parametrize(
    ("answer", "params", "outcome"),
    [
        (b'{"kv_transfer_params": {"a": 1}}', {"a": 1}, "offered"),
        (b'{"kv_transfer_params": null}', None, "nothing"),
        (b"{}", None, "nothing"),
        (b"[", None, "garbage"),
        (b'{"kv_transfer_params": "\xff"}', None, "garbage"),
        ((404, b"{}"), None, "refused"),
        ((500, b"{}"), None, "refused"),
        ("late", None, "late"),
    ],
)
def test_only_a_ticket_is_used(answer: Any, params: Any, outcome: str) -> None:
    found, why, seen = ask(answer, {"prompt": [1, 2], "stream": True})
    assert (found, why) == (params, outcome)
    assert seen == [{"prompt": [1, 2], "stream": True}]


def test_a_worker_that_is_gone_is_not_waited_for() -> None:
    assert ask(b"{}", {"prompt": [1]}, gone=True) == (None, "down", [])


def test_a_chat_whose_tokens_are_known_is_asked_for_by_them() -> None:
    body = {"messages": [], "prompt_token_ids": [1, 2], "cache_salt": "s", "stream": True}
    *_, seen = ask(b"{}", body)
    assert json.loads(json.dumps(seen)) == [{"prompt": [1, 2], "cache_salt": "s"}]
