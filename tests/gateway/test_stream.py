"""Laws of the relay: the client sees one unbroken stream, whatever workers do."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from tests.gateway.stub import BASE, Fleet, Script, Stub, serving, text_of, whole_text

from pigou.control.messages import FirstToken
from pigou.request import Role

TOKENS = 12
PROMPT = "a prompt that is longer than one block of sixteen tokens, surely so it is"


async def events(fleet: Fleet, chat: bool, **more: Any) -> list[Any]:
    """Stream a request; return the payloads, the last of them "[DONE]"."""
    body: dict[str, Any] = {"max_tokens": TOKENS, "stream": True, "temperature": 0, **more}
    body |= {"messages": [{"role": "user", "content": PROMPT}]} if chat else {"prompt": PROMPT}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    async with aiohttp.ClientSession() as session, session.post(fleet.url + path, json=body) as r:
        assert r.status == 200, await r.text()
        assert r.headers["content-type"].startswith("text/event-stream")
        text = (await r.read()).decode()
    assert text.endswith("\n\n")
    payloads = [each.removeprefix("data: ") for each in text.split("\n\n")[:-1]]
    assert payloads[-1] == "[DONE]"
    return [json.loads(each) for each in payloads[:-1]] + ["[DONE]"]


def text(found: list[Any]) -> str:
    parts = [c["choices"][0] for c in found[:-1] if c.get("choices")]
    return "".join(p["delta"].get("content") or "" if "delta" in p else p["text"] for p in parts)


def check(found: list[Any], chat: bool, tokens: int = TOKENS, usage: bool = False) -> None:
    """The stream is whole, and nothing tells that it moved."""
    assert all("error" not in chunk for chunk in found[:-1]), found
    assert text(found) == whole_text(tokens)
    assert len({chunk["id"] for chunk in found[:-1]}) == 1
    assert len({chunk["created"] for chunk in found[:-1]}) == 1
    finishes = [c["choices"][0]["finish_reason"] for c in found[:-1] if c["choices"]]
    assert finishes[-1] == "length"
    assert set(finishes[:-1]) <= {None}
    if chat:
        roles = [c["choices"][0]["delta"].get("role") for c in found[:-1] if c["choices"]]
        assert roles == ["assistant"] + [None] * (len(roles) - 1)
        assert {c["object"] for c in found[:-1]} == {"chat.completion.chunk"}
    if usage:
        (told,) = [c["usage"] for c in found[:-1] if c.get("usage")]
        assert told["completion_tokens"] == tokens
        assert told["total_tokens"] == told["prompt_tokens"] + tokens
        assert 0 <= told["prompt_tokens_details"]["cached_tokens"] <= told["prompt_tokens"]


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("cut", [0, 1, 7])
async def test_a_stream_passes_unchanged_but_for_the_ids(chat: bool, cut: int) -> None:
    async with serving(Stub("a", script=Script(cut=cut))) as fleet:
        found = await events(fleet, chat, stream_options={"include_usage": True})
        check(found, chat, usage=True)
        assert str(BASE) not in json.dumps(found)
        assert all(not chunk.get("prompt_token_ids") for chunk in found[:-1])
        await fleet.settle()


@pytest.mark.parametrize("chat", [False, True])
async def test_ids_are_passed_on_to_who_asked(chat: bool) -> None:
    async with serving(Stub("a")) as fleet:
        found = await events(fleet, chat, return_token_ids=True)
        ids = [i for c in found[:-1] for i in c["choices"][0].get("token_ids") or []]
        assert ids == [BASE + i for i in range(TOKENS)]


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("k", range(TOKENS + 1))
async def test_a_worker_may_die_after_any_token(k: int, usage: bool, chat: bool) -> None:
    script = Script(die_after=k, times=1)
    async with serving(Stub("a", script=script), Stub("b", script=script)) as fleet:
        more = {"stream_options": {"include_usage": True}} if usage else {}
        found = await events(fleet, chat, **more)
        check(found, chat, usage=usage)
        assert script.times == 0
        asked = [seen.body for stub in fleet.stubs.values() for seen in stub.seen]
        if 0 < k < TOKENS:
            (resumed,) = [body for body in asked if "resume_tokens" in body]
            assert resumed["resume_tokens"] <= k
            assert resumed["max_tokens"] == TOKENS
        assert len({json.dumps(body.get("seed")) for body in asked}) == 1
        await fleet.settle()


@pytest.mark.parametrize("fault", ["garbage_after", "error_after", "abort_after", "end_after"])
@pytest.mark.parametrize("k", [0, 1, 4, TOKENS - 1])
async def test_whatever_a_worker_sends_instead_the_stream_goes_on(fault: str, k: int) -> None:
    script = Script(**{fault: k, "times": 1})
    async with serving(Stub("a", script=script), Stub("b", script=script)) as fleet:
        check(await events(fleet, chat=True), chat=True)
        await fleet.settle()


@pytest.mark.parametrize("chat", [False, True])
async def test_a_stream_survives_death_after_death(chat: bool) -> None:
    scripts = [Script(die_after=2, times=3) for _ in range(2)]
    stubs = [Stub(f"w{i}", script=script) for i, script in enumerate(scripts)]
    async with serving(*stubs) as fleet:
        found = await events(fleet, chat, stream_options={"include_usage": True})
        check(found, chat, usage=True)
        assert sum(3 - script.times for script in scripts) >= 4


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize(
    ("per_chunk", "k"),
    # Of a chunk of several tokens it cannot be seen whether it ends within a character.
    [(1, k) for k in range(TOKENS + 1)] + [(3, k) for k in (0, 1, 2, 4)],
)
async def test_a_stock_worker_takes_over_at_a_whole_character(
    k: int, chat: bool, per_chunk: int
) -> None:
    script = Script(die_after=k, times=1, per_chunk=per_chunk)
    stubs = [Stub(name, stock=True, script=script) for name in "ab"]
    async with serving(*stubs, strict=False) as fleet:
        found = await events(fleet, chat, stream_options={"include_usage": True})
        check(found, chat, usage=True)
        for stub in stubs:
            assert all("resume_tokens" not in seen.body for seen in stub.seen)
        await fleet.settle()


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("k", range(1, TOKENS))
async def test_a_stock_worker_takes_over_from_one_of_pigou(k: int, chat: bool) -> None:
    own = Stub("own", script=Script(die_after=k, times=1))
    async with serving(own, Stub("stock", stock=True)) as fleet:
        for _ in range(4):  # the router sends the first of them, or the second, to `own`
            check(await events(fleet, chat), chat)
        assert own.script.times == 0
        await fleet.settle()


@pytest.mark.parametrize(
    "field",
    [{"stop": ["zz"]}, {"presence_penalty": 1.0}, {"response_format": {"type": "json_object"}},
     {"seed": 3, "temperature": 1.0}, {"logprobs": True}, {"unheard_of": 1}],
)  # fmt: skip
async def test_a_stock_worker_is_not_asked_to_resume_what_it_cannot(field: dict[str, Any]) -> None:
    script = Script(die_after=3, times=1)
    stubs = [Stub(name, stock=True, script=script) for name in "ab"]
    async with serving(*stubs, strict=False) as fleet:
        found = await events(fleet, True, **field)
        assert found[-2]["error"]["code"] == 502
        assert "cannot go on elsewhere" in found[-2]["error"]["message"]
        await fleet.settle()


async def test_both_legs_carry_what_the_protocol_says() -> None:
    stubs = [Stub("p", Role.PREFILL), Stub("d", Role.DECODE)]
    async with serving(*stubs) as fleet:
        found = await events(
            fleet, True, stream_options={"include_usage": True}, min_tokens=1, stop=["zz"]
        )
        check(found, True, usage=True)
        ((one,), (two,)) = (stub.seen for stub in stubs)
        assert one.body["kv_transfer_params"]["do_remote_decode"] is True
        assert (one.body["stream"], one.body["max_tokens"]) == (False, 1)
        assert not {"stream_options", "min_tokens", "stop"} & set(one.body)
        assert two.body["kv_transfer_params"] == {
            "do_remote_prefill": True, "from": "p", "nested": [[1, 2]],
        }  # fmt: skip
        assert (two.body["max_tokens"], two.body["stop"]) == (TOKENS, ["zz"])
        assert one.request_id == two.request_id
        await fleet.settle()


@pytest.mark.parametrize("k", [0, 1, 5])
async def test_a_resumed_stream_takes_both_legs_again(k: int) -> None:
    script = Script(die_after=k, times=1)
    decoders = [Stub(f"d{i}", Role.DECODE, script=script) for i in range(2)]
    prefill = Stub("p", Role.PREFILL)
    async with serving(prefill, *decoders) as fleet:
        check(await events(fleet, False), False)
        assert len(prefill.seen) == 2
        second = prefill.seen[1].body["prompt"]
        assert second == PROMPT if k == 0 else second == [*PROMPT.encode(), *range(BASE, BASE + k)]
        await fleet.settle()


async def test_a_dead_prefill_worker_is_passed_over() -> None:
    dead = Stub("p", Role.PREFILL, script=Script(die_after=0))
    async with serving(dead, Stub("d", Role.DECODE)) as fleet:
        check(await events(fleet, True), True)
        (seen,) = fleet.stubs["d"].seen
        assert "kv_transfer_params" not in seen.body
        await fleet.settle()


async def test_without_a_ticket_the_decode_worker_computes_the_prompt() -> None:
    prefill = Stub("p", Role.PREFILL, script=Script(no_ticket=True))
    async with serving(prefill, Stub("d", Role.DECODE)) as fleet:
        check(await events(fleet, False), False)
        assert "kv_transfer_params" not in fleet.stubs["d"].seen[0].body


@pytest.mark.parametrize("k", [0, 1, 6])
async def test_a_worker_that_hangs_is_left_once_it_is_declared_down(k: int) -> None:
    script = Script(hang_after=k, times=1)
    async with serving(Stub("a", script=script), Stub("b", script=script)) as fleet:
        task = asyncio.create_task(events(fleet, True))
        while script.times > 0:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        (hung,) = [name for name, up in fleet.plane_driver.upstreams.items() if up.inflight]
        await fleet.plane_driver.down(hung)
        check(await task, True)
        await fleet.settle()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_the_worker(stream: bool) -> None:
    held = None if stream else asyncio.Event()
    stub = Stub("a", script=Script(delay_s=0.05, held=held))
    async with serving(stub) as fleet:
        body = {"prompt": PROMPT, "max_tokens": 1000, "stream": stream}
        session = aiohttp.ClientSession()
        task = asyncio.create_task(session.post(fleet.url + "/v1/completions", json=body))
        while not stub.active:
            await asyncio.sleep(0.01)
        if stream:
            await (await task).content.readany()
        else:
            task.cancel()
        await session.close()
        await fleet.settle()
        while stub.active:
            await asyncio.sleep(0.01)
        assert fleet.metrics.cancelled._value.get() == 1


async def test_with_no_worker_left_the_stream_ends_in_an_honest_error() -> None:
    async with serving(Stub("a", script=Script(die_after=3))) as fleet:
        script = fleet.stubs["a"].script
        task = asyncio.create_task(events(fleet, True))
        while script.times == 1_000_000:
            await asyncio.sleep(0.01)
        script.die_after = 0
        found = await task
        assert text(found) == "".join(text_of(i) for i in range(3))
        assert found[-2]["error"]["code"] == 502
        await fleet.settle()


async def test_a_first_token_is_told_to_the_control_plane() -> None:
    async with serving(Stub("a")) as fleet:
        facts: list[Any] = []
        observe = fleet.plane_driver.plane.observe
        fleet.plane_driver.plane.observe = lambda fact, now: (
            facts.append(fact),
            observe(fact, now),
        )[1]  # type: ignore[method-assign,func-returns-value]
        await events(fleet, True)
        assert [type(fact) for fact in facts].count(FirstToken) == 1
