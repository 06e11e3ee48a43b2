"""Caches above the engine: within tenure, fresh, and replayed as the fleet would answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from tests.gateway.stub import Fleet, Script, Stub, serving

from pigou.config import ConfigError
from pigou.gateway.auth.keys import Key, Keys, make_key
from pigou.gateway.caches.context import Context, compile_context
from pigou.gateway.caches.layers import CacheLayer, Caches, read_caches
from pigou.gateway.caches.semantic import guard

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
        for at in (1e300, -1, 1e10):
            assert (await call(fleet, "/v1/manifest", change | {"changed_at": at}))[0] == 400
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


async def test_workers_free_what_an_ended_session_left_whichever_gateway_is_told() -> None:
    told: asyncio.Queue[list[str]] = asyncio.Queue()

    async def end(request: web.Request) -> web.Response:
        told.put_nowait((await request.json())["salts"])
        return web.json_response({})

    own = Stub("own", routes={"/v1/kv/end": end})
    async with serving(own) as fleet:
        for session in ("a", "a", "b"):
            await ask(fleet, headers={"X-Pigou-Session": session})
        first, again, other = (seen.body["cache_salt"] for seen in own.seen)
        assert first == again != other
        await call(fleet, "/v1/sessions/a", method="DELETE")
        assert await told.get() == [first]
        await call(fleet, "/v1/sessions/a", method="DELETE")  # of which nothing is left
        await call(fleet, "/v1/sessions/b", method="DELETE")
        assert await told.get() == [other]
        assert told.empty()


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


def question(words: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": words}]}


async def test_a_similar_question_is_answered_for_who_asks_and_never_past_the_guard() -> None:
    caches = ("answer=1MiB", "semantic=1MiB,threshold=0.8")
    wants = {"X-Pigou-Cache": "semantic"}
    first = "Please tell me how I can reset the password of my account"
    async with serving(Stub("w"), caches=caches) as fleet:
        assert (await ask(fleet, headers=wants, **question(first)))[1] == "miss"
        similar = "Please tell me how I can reset the password of my account?"
        _, said, reply = await ask(fleet, headers=wants, **question(similar))
        assert said.startswith("hit; semantic; distance=0.")
        assert (await ask(fleet, **question(similar)))[1] == "miss"  # did not ask for it
        for other in (
            "Please tell me how I can not reset the password of my account",
            "Please tell me how I can reset the password of my account 2",
            "Please tell me how I can reset the password of my acme account",
            "Cook rice",
        ):
            assert (await ask(fleet, headers=wants, **question(other)))[1] == "miss"
        elsewhere = wants | {"X-Pigou-Tenure-Permissions": "hr"}
        assert (await ask(fleet, headers=elsewhere, **question(similar + "?")))[1] == "miss"
        rating = {"id": reply["id"], "rating": "down"}
        assert (await call(fleet, "/v1/feedback", rating))[1]["removed"] >= 1
        assert (await ask(fleet, headers=wants, **question(similar + "??")))[1] == "miss"
        async with (
            aiohttp.ClientSession() as session,
            session.get(fleet.url + "/metrics") as page,
        ):
            metrics = await page.text()
        assert 'pigou_cache_hits_total{layer="semantic",model_name="stub"} 1.0' in metrics
        assert "pigou_semantic_cache_hit_distance" in metrics
        assert 'pigou_answer_ratings_total{model_name="stub",rating="down"} 1.0' in metrics


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("What's the boiling point of water?", "what is the boiling point of water", True),
        ("Could you sort these mails, please", "sort these mails", True),
        ("I can't log in to the portal", "I cannot log in to the portals", True),
        ("who is the mayor of london", "who is the mayor of dublin", False),
        ("flights from rome to oslo", "flights from oslo to rome", False),
        ("who was the president", "who is the president", False),
        ("do i pay for a room", "can i pay for a room", False),
        ("does it run", "could it run", False),
        ("what is US gdp", "what is gdp", False),
        ("should i take the train", "should i not take the train", False),
        ("isn't this legal", "is this legal", False),
        ("a loop in c#", "a loop in c", False), ("x = y", "x != y", False),
        ("(a+b)*c", "a+(b*c)", False), ("version 2.0", "version 20", False),
    ],
)  # fmt: skip
def test_texts_are_alike_if_all_words_but_fillers_are(one: str, other: str, alike: bool) -> None:
    assert (guard(one) == guard(other)) == alike


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


def test_a_context_has_its_stable_prefix_first_whatever_the_order_of_tools_and_keys() -> None:
    parts: dict[str, Any] = {
        "system": "Be brief.",
        "history": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        "user": "Why?",
    }
    compiled = [
        compile_context(msgspec.convert(parts | {"tools": tools, "evidence": evidence}, Context))
        for tools, evidence in (
            ([tool("x"), tool("y")], [{"id": "1", "text": "one"}]),
            ([dict(reversed(tool("y").items())), tool("x")], [{"id": "2", "text": "two"}]),
        )
    ]
    first, second = compiled
    assert msgspec.json.encode(first.tools) == msgspec.json.encode(second.tools)
    assert first.messages[:-1] == second.messages[:-1]
    assert first.messages[-1]["content"] == "[1] one\n\nWhy?"
    assert first.dropped == {}


@given(st.integers(20, 400), st.integers(0, 8), st.integers(0, 8), st.integers(0, 8))
def test_a_context_keeps_its_budget_and_reports_what_it_dropped(
    total: int, tools: int, turns: int, passages: int
) -> None:
    history = [{"role": ("user", "assistant")[i % 2], "content": "w" * 40} for i in range(turns)]
    context = msgspec.convert(
        {
            "system": "s" * 40, "user": "u" * 20, "history": history,
            "tools": [tool(f"t{i}") for i in range(tools)],
            "evidence": [{"id": str(i), "text": "e" * 60} for i in range(passages)],
            "budgets": {"total": total, "evidence": 60},
        },
        Context,
    )  # fmt: skip
    compiled = compile_context(context)
    assert sum(compiled.tokens.values()) <= total
    assert compiled.tokens["evidence"] <= 60
    kept = compiled.messages[1:-1]
    assert kept == history[len(history) - len(kept) :]
    assert not kept or kept[0]["role"] == "user"
    assert len(kept) + len(compiled.dropped.get("history", [])) == turns
    assert len(compiled.tools) + len(compiled.dropped.get("tools", [])) == tools
    assert compiled == compile_context(context)


async def test_a_chat_may_send_its_context_in_parts() -> None:
    stub = Stub("w")
    parts = {"system": "s", "user": "u", "evidence": [{"id": "1", "text": "x" * 99}],
             "budgets": {"evidence": 5}}  # fmt: skip
    async with serving(stub, caches=("context=1MiB",)) as fleet:
        body = {"context": parts, "max_tokens": 2}
        for _ in range(2):
            status, _ = await call(fleet, CHAT, body)
            assert status == 200
            assert [m["content"] for m in stub.seen[-1].body["messages"]] == ["s", "u"]
        status, said = await call(fleet, "/v1/contexts", parts)
        assert said["dropped"] == {"evidence": ["1"]}
        for wrong in (parts | {"budgets": {"user": 0}}, parts | {"x": 1}, {"user": 1}):
            assert (await call(fleet, CHAT, {"context": wrong}))[0] == 400
        assert (await call(fleet, CHAT, body | {"messages": MESSAGES}))[0] == 400


async def test_an_embedding_is_computed_once_for_a_text() -> None:
    batches: list[list[str]] = []

    async def embed(request: web.Request) -> web.Response:
        body = await request.json()
        texts = [body["input"]] if isinstance(body["input"], str) else body["input"]
        batches.append(texts)
        data = [{"object": "embedding", "index": i, "embedding": [len(text), 0.5]}
                for i, text in enumerate(texts)]  # fmt: skip
        usage = {"prompt_tokens": 4, "total_tokens": 4}
        return web.json_response({"object": "list", "data": data, "model": "stub", "usage": usage})

    stub = Stub("w", stock=True, routes={"/v1/embeddings": embed})
    async with serving(stub, caches=("embedding=1MiB",)) as fleet:
        page = "/v1/embeddings"
        for texts in (["a", "bbb"], "bbb", ["bbb", "a"]):
            status, reply = await call(fleet, page, {"model": "stub", "input": texts})
            lengths = [row["embedding"][0] for row in reply["data"]]
            asked = [texts] if isinstance(texts, str) else texts
            assert (status, lengths) == (200, [len(text) for text in asked])
        assert batches == [["a", "bbb"]]
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 4
        for other in ({"dimensions": 2}, {"cache_salt": "x"}, {"input": ["a", "new"]}):
            await call(fleet, page, {"model": "stub", "input": "a"} | other)
        assert len(batches) == 4


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("answer=1MiB,quota.acme=0.6:0.5", "a floor up to the ceiling"),
        ("answer=1MiB,quota.acme=0.6", "write TENANT=FLOOR:CEILING"),
        ("answer=1MiB,quota.a=0.6:1,quota.b=0.6:1", "floors are 1.2 together"),
        ("answer=1MiB,quota.*=0:0.3", "write quota=SHARE"),
        ("answer=1MiB,quota=0", "must be in"),
    ],
)
def test_quotas_of_a_cache_that_cannot_hold_are_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        read_caches([text])


async def test_a_cache_has_quotas_of_tenants_with_a_key_alone() -> None:
    with pytest.raises(ConfigError, match="cache answer: quota has tenant 'acme', which has no"):
        async with serving(Stub("w"), caches=("answer=1MiB,quota.acme=0.2:0.5",)):
            pass
    text = "answer=1MiB,quota=0.4,quota.acme=0.2:0.5"
    async with serving(Stub("w"), caches=(text,), keys=Keys([Key("acme", b"digest")])):
        pass
    accounts = Caches([text]).layers[CacheLayer.ANSWER].accounts
    assert [accounts.bounds(tenant)[1] for tenant in ("acme", "other")] == [2**19, 419430]
