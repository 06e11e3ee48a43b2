"""Caches above the engine: within tenure, fresh, and replayed as the fleet would answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
from tests.gateway.stub import Fleet, Script, Stub, serving

from pigou.gateway.auth.keys import Keys, make_key

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


async def call(
    fleet: Fleet, path: str, body: Any = None, method: str = "POST",
    headers: Mapping[str, str] | None = None,
) -> tuple[int, Any]:  # fmt: skip
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, fleet.url + path, json=body, headers=headers) as reply,
    ):
        return reply.status, await reply.json()


CORPUS = {"X-Pigou-Tenure-Corpus": "handbook", "X-Pigou-Tenure-Permissions": "staff,hr"}


async def test_a_changed_corpus_or_permission_never_answers_from_before() -> None:
    script = Script()
    async with serving(Stub("w", script=script), caches=("answer=1MiB", "tool=1MiB")) as fleet:
        for seed, field, value in ((1, "corpus", "handbook"), (2, "permissions", "hr")):
            assert (await ask(fleet, headers=CORPUS, seed=seed))[1] == "miss"
            assert (await ask(fleet, headers=CORPUS, seed=seed))[1] == "hit"
            key = {"tool": "t", "arguments": {"seed": seed}}
            _, missed = await call(fleet, "/v1/caches/tool/lookup", key, headers=CORPUS)
            change = {"field": field, "value": value, "version": "2"}
            status, said = await call(fleet, "/v1/manifest", change)
            assert (status, said["voided"]) == (200, seed)
            # What was made before the change, and comes after it, is not stored.
            late = key | {"value": 1, "ticket": missed["ticket"]}
            assert (await call(fleet, "/v1/caches/tool/store", late, headers=CORPUS))[0] == 409
            # Nor is an answer under way while it changes.
            script.held = asyncio.Event()
            running = asyncio.create_task(ask(fleet, headers=CORPUS, seed=seed))
            while not fleet.stubs["w"].active:
                await asyncio.sleep(0.005)
            await call(fleet, "/v1/manifest", change | {"version": "3"})
            script.held.set()
            assert (await running)[1] == "miss"
            script.held = None
            assert (await ask(fleet, headers=CORPUS, seed=seed))[1] == "miss"
        old = CORPUS | {"X-Pigou-Tenure-Corpus": "handbook@2"}
        assert [(await ask(fleet, headers=old))[1] for _ in range(2)] == ["miss", "miss"]


async def test_tool_results_are_found_by_canonical_arguments_until_their_ttl() -> None:
    async with serving(Stub("w"), caches=("tool=1MiB",)) as fleet:
        page = "/v1/caches/tool/"
        _, missed = await call(fleet, page + "lookup", {"tool": "t", "arguments": {"b": 1, "a": 2}})
        item = {"tool": "t", "arguments": {"a": 2, "b": 1}, "value": [1], "ttl_s": 0.2}
        _, said = await call(fleet, page + "store", item | {"ticket": missed["ticket"]})
        assert said == {"stored": True}
        look = {"tool": "t", "arguments": {"b": 1, "a": 2}}
        assert (await call(fleet, page + "lookup", look))[1] == {"hit": True, "value": [1]}
        await asyncio.sleep(0.25)
        assert not (await call(fleet, page + "lookup", look))[1]["hit"]
        for layer, body in (("retrieval", {"query": "q"}), ("tool", {"query": "q"}),
                            ("answer", {}), ("tool", {"tool": "t", "x": 1})):  # fmt: skip
            status, said = await call(fleet, f"/v1/caches/{layer}/lookup", body)
            assert status in (400, 404, 409)
            assert said["error"]["message"]


async def test_an_ended_session_finds_nothing_that_it_left() -> None:
    stub = Stub("w")
    async with serving(stub, caches=("answer=1MiB",)) as fleet:
        mine, other = {"X-Pigou-Session": "a"}, {"X-Pigou-Session": "b"}
        for headers in (mine, other):
            assert [(await ask(fleet, headers=headers))[1] for _ in range(2)] == ["miss", "hit"]
        salts = [seen.body["cache_salt"] for seen in stub.seen]
        assert len(set(salts)) == 2
        assert (await call(fleet, "/v1/sessions/a", method="DELETE"))[1]["voided"] == 1
        assert (await ask(fleet, headers=mine))[1] == "miss"
        assert stub.seen[-1].body["cache_salt"] not in salts  # its KV blocks are not found either
        assert (await ask(fleet, headers=other))[1] == "hit"
        assert (await ask(fleet, headers={"X-Pigou-Session": "a b"}))[0] == 400


async def test_equal_requests_under_way_are_computed_once() -> None:
    script = Script(held=asyncio.Event())
    stub = Stub("w", script=script)
    async with serving(stub, caches=("answer=1MiB",)) as fleet:
        running = [asyncio.create_task(ask(fleet, stream=i % 2 == 1)) for i in range(6)]
        while not stub.active:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        assert script.held is not None
        script.held.set()
        replies = await asyncio.gather(*running)
        assert sorted(said for _, said, _ in replies) == ["hit"] * 5 + ["miss"]
        assert {text(reply) for _, _, reply in replies} == {" t0 t1 t2"}
        assert len([seen for seen in stub.seen if seen.body.get("max_tokens") != 1]) == 1


async def test_what_a_client_says_of_caches_is_honoured_or_refused() -> None:
    async with serving(Stub("w"), caches=("answer=1MiB",)) as fleet:
        control = {"Cache-Control": "only-if-cached"}
        assert (await ask(fleet, headers=control))[0] == 504
        assert (await ask(fleet, headers={"Cache-Control": "no-store"}))[1] == "miss"
        assert (await ask(fleet))[1] == "miss"
        assert (await ask(fleet, headers=control))[1] == "hit"
        assert (await ask(fleet, headers={"Cache-Control": "no-cache"}))[1] == "miss"
        assert (await ask(fleet, temperature=1))[1] == ""  # sampled, so not cached
        sampled = {"X-Pigou-Cache": "sampled"}
        said = [(await ask(fleet, headers=sampled, temperature=1))[1] for _ in range(2)]
        assert said == ["miss", "hit"]
        assert (await ask(fleet, headers={"X-Pigou-Cache": "x"}))[0] == 400


async def test_a_key_finds_nothing_of_another_tenant(tmp_path: Path) -> None:
    made = [make_key(name) for name in ("ann", "bob")]
    (tmp_path / "keys").write_text("\n".join(line for _, line in made))
    keys = Keys.read(tmp_path / "keys")
    async with serving(Stub("w"), keys=keys, caches=("answer=1MiB",)) as fleet:
        for secret, _ in made:
            headers = {"authorization": f"Bearer {secret}"}
            said = [(await ask(fleet, headers=headers))[1] for _ in range(2)]
            assert said == ["miss", "hit"]
        change = {"field": "corpus", "value": "x", "tenant": "ann"}
        assert (await call(fleet, "/v1/manifest", change, headers=headers))[0] == 403
