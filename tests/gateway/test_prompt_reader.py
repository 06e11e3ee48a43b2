"""Laws of tokenizing in the gateway: what it counts and hashes is what the worker computes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fleet.harness import Client, running
from tests.gateway.stub import Stub

from pigou.config import ConfigError, ControlConfig
from pigou.control.lengths import lexical
from pigou.control.plane import ControlPlane
from pigou.fleet.serve import Serving
from pigou.gateway.plane_driver import PlaneDriver
from pigou.gateway.prompt_reader import (
    PromptReader,
    PromptTokenizer,
    TokenizationMode,
    text_or_ids,
)
from pigou.gateway.proxy.upstream import Engine
from pigou.gateway.request import GatewayRun
from pigou.gateway.request_parsing import read
from pigou.models import bundled_path
from pigou.request import Worker

TEXT = "The market of Alexandria opens at dawn; naïve travellers — 旅人 — pay the toll twice. "
CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
FAST = ("--executor", "sleep", "--sleep-base", "1000000", "--repeat", "1", "--rehearse", "0")

BODIES: list[tuple[str, dict[str, Any]]] = [
    (COMPLETION, {"prompt": TEXT * 6}),
    (COMPLETION, {"prompt": TEXT * 30}),
    (COMPLETION, {"prompt": TEXT * 6, "add_special_tokens": False}),
    (COMPLETION, {"prompt": "x" + TEXT * 6, "truncate_prompt_tokens": 83}),
    (COMPLETION, {"prompt": [10 + i % 200 for i in range(147)]}),
    (COMPLETION, {"prompt": "salty " + TEXT * 6, "cache_salt": "mine"}),
    (COMPLETION, {"prompt": "echo " + TEXT * 6, "echo": True}),
    (COMPLETION, {"prompt": ["first " + TEXT * 6, "second"], "n": 1}),
    (COMPLETION, {"prompt": "twice " + TEXT * 6, "n": 2}),
    (CHAT, {"messages": [{"role": "user", "content": TEXT * 6}]}),
    (CHAT, {"messages": [{"role": "user", "content": "long " + TEXT * 30}]}),
    (CHAT, {"messages": [
        {"role": "user", "content": [{"type": "text", "text": part} for part in (TEXT, "?")]},
        {"role": "assistant", "content": "Indeed. " * 12},
        {"role": "user", "content": "And then?"},
    ]}),
    (CHAT, {"messages": [{"role": "user", "content": TEXT * 2},
                         {"role": "assistant", "content": "They pay " * 9}],
            "add_generation_prompt": False, "continue_final_message": True}),
]  # fmt: skip


@asynccontextmanager
async def fleet(*counts: int) -> AsyncIterator[tuple[Serving, Client]]:
    async with running(*counts, arguments=FAST) as (serving, client):
        yield serving, client


async def decided(
    client: Client, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
) -> tuple[Any, Any]:
    """Return the reply, and the decision that it names."""
    wanted = {"max_tokens": 3, "temperature": 0, "ignore_eos": True, **body}
    async with client.session.post(client.url + path, json=wanted, headers=headers) as response:
        assert response.status == 200, await response.text()
        reply = await response.json()
        id = response.headers["x-pigou-decision"]
    async with client.session.get(f"{client.url}/decisions/{id}") as response:
        assert response.status == 200
        return reply, await response.json()


async def overlapping(
    client: Client, path: str, body: dict[str, Any], tokens: int,
    headers: dict[str, str] | None = None,
) -> tuple[Any, Any]:  # fmt: skip
    """Ask again until so many tokens are known to be cached: KV events may come after replies."""
    for _ in range(1200):
        reply, why = await decided(client, path, body, headers)
        if why["cached_tokens"] >= tokens:
            return reply, why
        await asyncio.sleep(0.05)
    raise AssertionError((body, why))


async def check_repeated(serving: Serving, client: Client) -> None:
    """A repeated prompt overlaps in all its full blocks."""
    assert serving.plane_driver.prompts is not None
    assert serving.plane_driver.prompts.mode(chat=False) is TokenizationMode.GATEWAY
    assert serving.plane_driver.prompts.mode(chat=True) is TokenizationMode.GATEWAY
    async with client.session.get(client.url + "/workers") as response:
        told = (await response.json())["tokenized"]
    assert told == {"completions": "here", "chats": "here"}
    for path, body in BODIES:
        first, before = await decided(client, path, body)
        tokens = first["usage"]["prompt_tokens"]
        several = body.get("prompt", [])[:1] == ["first " + TEXT * 6]
        cached = 128 if several else min(tokens // 16 * 16, tokens - 1)
        again, after = await overlapping(client, path, body, cached)
        assert again["usage"]["prompt_tokens"] == tokens
        if several:  # the first counts
            continue
        assert before["prompt_tokens"] == after["prompt_tokens"] == tokens, body
        assert after["cached_tokens"] == cached, (body, after)


async def test_prompts_overlap_in_full_blocks_unless_their_salts_differ() -> None:
    async with fleet(0, 0, 1) as (serving, client):
        await check_repeated(serving, client)
        body = {"prompt": "other salts: " + TEXT * 6}
        await overlapping(client, COMPLETION, body, 1)
        _, why = await decided(client, COMPLETION, body | {"cache_salt": "other"})
        assert why["cached_tokens"] == 0
        named = {"X-Pigou-Tenure-Principal": "ann"}
        _, why = await decided(client, COMPLETION, body, named)
        assert why["cached_tokens"] == 0
        _, why = await overlapping(client, COMPLETION, body, 1, named)
        scored = call_of(body | {"prompt_logprobs": 1})
        await serving.plane_driver.read(scored)
        assert (scored.prompt_tokens, dict(scored.keys)) == (why["prompt_tokens"], {})


async def test_split_prompts_overlap_too_and_streams_name_their_decision_and_worker() -> None:
    async with fleet(1, 1, 0) as (serving, client):
        await check_repeated(serving, client)
        wanted = {"prompt": TEXT * 40, "max_tokens": 4, "stream": True, "ignore_eos": True}
        async with client.session.post(client.url + COMPLETION, json=wanted) as response:
            await response.read()
            assert response.headers["x-pigou-worker"] == "decode-0"
            why = serving.plane_driver.plane.decision(response.headers["x-pigou-decision"])
            assert why is not None
            named = response.headers.get("x-pigou-prefill-worker")
            assert named == (why.prefill[why.chosen] or None)


def call_of(body: dict[str, Any], *, chat: bool = False) -> GatewayRun:
    return GatewayRun.of(read(msgspec.json.encode(body), chat=chat, strict=True))


async def met(stub: Stub, prompts: PromptReader) -> PlaneDriver:
    plane_driver = PlaneDriver(ControlPlane(ControlConfig()), prompts)
    await plane_driver.up(Worker(stub.name, stub.url, stub.role), Engine(stub.stock, "stub", 2048))
    return plane_driver


class Tokenizing(Stub):
    """A worker whose `/tokenize` gives each character's code; `broken` ones have none."""

    asked = 0
    broken = False

    async def _tokenize(self, request: Any) -> Any:
        from aiohttp import web

        body = await request.json()
        self.asked += 1
        if self.broken:
            return web.json_response({"detail": "Not Found"}, status=404)
        text = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
        return web.json_response({"count": len(text), "tokens": [ord(each) for each in text]})


async def test_workers_are_asked_where_the_tokenizer_here_disagrees() -> None:
    for speller in (None, PromptTokenizer.load(bundled_path())):
        stub = Tokenizing("a", stock=True)
        runner = await stub.start()
        plane_driver = await met(stub, PromptReader(speller))
        try:
            assert plane_driver.prompts is not None
            assert plane_driver.prompts.mode(chat=True) is TokenizationMode.WORKER
            for chat in (False, True):
                source: dict[str, Any] = {"prompt": "a" * 40}
                if chat:
                    source = {"messages": [{"role": "user", "content": "a" * 40}]}
                asked = stub.asked
                call = call_of(source, chat=chat)
                await plane_driver.read(call)
                assert (call.prompt_tokens, len(call.keys[16]), stub.asked) == (40, 2, asked + 1)
                assert "prompt_token_ids" not in call.body
            ids = call_of({"prompt": list(range(48))})
            asked = stub.asked
            await plane_driver.read(ids)
            assert (ids.prompt_tokens, len(ids.keys[16]), stub.asked) == (48, 3, asked)
        finally:
            await plane_driver.stop()
            await runner.cleanup()


@pytest.mark.parametrize("predictor", ["mean", "online"])
async def test_words_are_counted_where_output_lengths_are_predicted(predictor: str) -> None:
    config = ControlConfig(lengths={"predictor": predictor})
    driver = PlaneDriver(ControlPlane(config), PromptReader(SPELLER))
    assert driver.prompts is not None
    driver.prompts._modes["w"] = (TokenizationMode.GATEWAY, TokenizationMode.GATEWAY)
    call = call_of({"prompt": "List why."})
    await driver.read(call)
    counted = call.request().features
    assert counted == (lexical("List why.") if predictor == "online" else ())
    await driver.stop()


async def test_without_any_tokenizer_requests_go_on_with_a_guess(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stub = Tokenizing("a", stock=True)
    stub.broken = True
    runner = await stub.start()
    plane_driver = await met(stub, PromptReader())
    try:
        assert "--tokenizer" in caplog.text
        call = call_of({"prompt": "a" * 400})
        await plane_driver.read(call)
        assert (call.prompt_tokens, dict(call.keys)) == (100, {})
        ids = call_of({"prompt": list(range(48))})
        await plane_driver.read(ids)
        assert (ids.prompt_tokens, len(ids.keys[16])) == (48, 3)
    finally:
        await plane_driver.stop()
        await runner.cleanup()


def test_a_tokenizer_that_cannot_be_had_is_refused(tmp_path: Any) -> None:
    for name in (str(tmp_path), str(tmp_path / "none"), "a/b/c"):
        with pytest.raises(ConfigError, match="tokenizer"):
            PromptTokenizer.named(name)


SPELLER = PromptTokenizer.load(bundled_path())


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=200), st.booleans())
def test_both_ways_of_the_backend_give_the_same_tokens(text: str, special: bool) -> None:
    plain = SPELLER.tokenizer.backend.encode(text, add_special_tokens=special).ids
    assert SPELLER.tokenizer.encode(text, special) == plain


@given(st.lists(st.integers(0, 400), min_size=1, max_size=40))
def test_the_first_of_several_prompts_is_read(ids: list[int]) -> None:
    assert text_or_ids(ids) == text_or_ids([ids, [1]]) == ids
    assert text_or_ids(["a", "b"]) == text_or_ids("a") == "a"
