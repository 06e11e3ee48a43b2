"""Laws of SGLang servers behind the gateway: learnt, two legs at once, streams that move."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from tests.fleet.harness import WATCH, Client, attached, running, text, until
from tests.fleet.sglang_stub import BOOTSTRAP, BOOTSTRAP_PORT, SglangStub
from tests.gateway.stub import BASE, Script, Stub, whole_text

from pigou.control.messages import Route
from pigou.fleet.config import AttachedWorker, FleetError
from pigou.fleet.member import check_fit
from pigou.fleet.probe import EventSource, probe
from pigou.gateway.proxy.upstream import Engine
from pigou.request import FinishReason, Request, Role

EVENTS = {
    "publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557, "topic": "",
    "block_size": 32, "dp_size": 2, "replay_endpoint_port_base": 5570,
}  # fmt: skip


async def test_a_server_is_learnt_from_its_own_pages() -> None:
    stub = SglangStub("a", events=EVENTS, mode="prefill")
    runner = await stub.start()
    found = await probe(stub.url)
    await runner.cleanup()
    assert (found.block_size, found.blocks, found.max_seqs) == (32, 2000, 48)
    assert found.sources == tuple(
        EventSource(f"tcp://127.0.0.1:{5557 + rank}", f"tcp://127.0.0.1:{5570 + rank}")
        for rank in range(2)
    )
    engine = found.engine
    assert (engine.stock, engine.family, engine.root) == (True, "sglang", "org/model")
    assert (engine.version, found.role) == ("0.5.23", Role.PREFILL)
    assert engine.bootstrap == ("127.0.0.1", BOOTSTRAP_PORT)


@pytest.mark.parametrize("events", [None, [], {"endpoint_host": 1}, {"endpoint_host": "*"}])
async def test_a_server_that_tells_of_no_publisher_has_no_sources(events: Any) -> None:
    stub = SglangStub("a", events=events)
    runner = await stub.start()
    found = await probe(stub.url)
    await runner.cleanup()
    assert (found.sources, found.block_size) == ((), 64)


async def test_its_load_is_read_by_its_own_names() -> None:
    stub = SglangStub("a", script=Script(hang_after=1))
    async with attached(stub) as (_, client):
        task = asyncio.create_task(client.reply(ignore_eos=None))
        rows = await until(client, lambda rows: rows["a"]["running"] == 1)
        assert (rows["a"]["waiting"], rows["a"]["kv_usage"]) == (2, 0.5)
        task.cancel()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chat", [False, True])
async def test_requests_are_such_as_it_accepts(chat: bool, stream: bool) -> None:
    async with attached(SglangStub("a")) as (_, client):
        assert await said(client, chat=chat, stream=stream) == whole_text(6)


async def said(client: Client, *, chat: bool, stream: bool, **fields: Any) -> str:
    """Return the text of a reply."""
    if stream and not chat:
        return text(await client.reply(max_tokens=6, ignore_eos=None, **fields))
    body: dict[str, Any] = {"max_tokens": 6, "stream": stream, **fields}
    body |= {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": "hi"}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    async with client.session.post(client.url + path, json=body) as response:
        assert response.status == 200, await response.text()
        read = await response.read()
    if not stream:
        (choice,) = msgspec.json.decode(read)["choices"]
        return choice["message"]["content"] if chat else choice["text"]
    lines = [line.removeprefix(b"data: ") for line in read.split(b"\n\n") if line]
    chunks = [msgspec.json.decode(line) for line in lines if line != b"[DONE]"]
    deltas = (choice["delta"] for chunk in chunks for choice in chunk["choices"])
    return "".join(delta.get("content") or "" for delta in deltas)


class Pair:
    """A gateway over prefill and decode servers, the prefill servers first."""

    def __init__(self, *scripts: Script, meeting_s: float = 2.0, prefills: int = 1) -> None:
        self.rooms: dict[int, Any] = {}
        modes = ["prefill"] * prefills + ["decode"] * (len(scripts) - prefills)
        self.stubs = [
            SglangStub(f"w{i}", mode=mode, script=script, rooms=self.rooms, meeting_s=meeting_s)
            for i, (mode, script) in enumerate(zip(modes, scripts, strict=True))
        ]

    async def __aenter__(self) -> Client:
        self._runners = [await stub.start() for stub in self.stubs]
        workers = tuple(
            AttachedWorker(id=stub.name, url=stub.url, role=Role(stub.mode)) for stub in self.stubs
        )
        self._fleet = running(0, 0, 0, attach=workers, watch=WATCH, template=None)
        self.serving, client = await self._fleet.__aenter__()
        await until(client, lambda rows: all(row["state"] == "up" for row in rows.values()))
        return client

    async def __aexit__(self, *error: Any) -> None:
        await self._fleet.__aexit__(None, None, None)
        for runner in self._runners:
            await runner.cleanup()


async def test_no_driver_has_a_prompt_computed_where_sglang_decodes() -> None:
    fleet = Pair(Script(), Script())
    async with fleet:
        driver = fleet.serving.plane_driver
        for number, prompt in enumerate((1, 5, 2000)):  # below a block, too
            id = f"picked-{number}"
            route = await driver.decide(Request(id, prompt, max_tokens=4), frozenset())
            assert isinstance(route, Route)
            assert (route.choice.prefill, route.choice.decode) == ("w0", "w1")
            driver.end(id, FinishReason.ABORT)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chat", [False, True])
async def test_both_legs_are_sent_at_once_and_meet_in_one_room(chat: bool, stream: bool) -> None:
    fleet = Pair(Script(), Script())
    async with fleet as client:
        replies = await asyncio.gather(*(said(client, chat=chat, stream=stream) for _ in range(3)))
        assert replies == [whole_text(6)] * 3
        prefills, decodes = ([seen.body for seen in stub.seen] for stub in fleet.stubs)
        told = [sorted(tuple(body[name] for name in BOOTSTRAP) for body in each)
                for each in (prefills, decodes)]  # fmt: skip
        assert told[0] == told[1]
        assert len(fleet.rooms) == 3
        assert all(body["stream"] is False for body in prefills)


@pytest.mark.parametrize("k", [0, 1, 4])
async def test_a_stream_moves_from_a_decode_server_that_dies(k: int) -> None:
    script = Script(die_after=k, times=1)
    async with Pair(Script(), script, script) as client:
        assert await said(client, chat=False, stream=True, temperature=0) == whole_text(6)
        assert script.times == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prefill_server_that_dies_ends_both_legs_and_both_are_sent_again(
    stream: bool,
) -> None:
    # Twice: what a kept connection dies of before a byte of reply is sent again on a new one.
    script = Script(die_after=0, times=2)
    fleet = Pair(Script(), script, script, meeting_s=30.0, prefills=2)
    async with fleet as client:
        fleet.stubs[0].script, fleet.stubs[2].script = script, Script()
        async with asyncio.timeout(10):  # the decode leg is broken off, and waits for nothing
            assert await said(client, chat=False, stream=stream) == whole_text(6)
        assert script.times == 0
        assert len(fleet.rooms) >= 2, "a new attempt meets in a new room"


async def test_a_prefill_server_that_refuses_a_request_ends_it_at_once() -> None:
    fleet = Pair(Script(status=400), Script(), meeting_s=20.0)
    async with fleet as client:
        async with asyncio.timeout(5):
            status, _ = await client.post("/v1/completions", prompt="hi", max_tokens=3)
        assert status == 400


async def test_a_decode_server_is_sent_nothing_alone() -> None:
    """It computes no prompts: a request waits for a prefill server."""
    stub = SglangStub("a", mode="decode")
    runner = await stub.start()
    worker = AttachedWorker(id="a", url=stub.url, role=Role.DECODE)
    async with running(0, 0, 0, attach=(worker,), template=None) as (_, client):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await client.post("/v1/completions", prompt="hi", max_tokens=3)
    assert not stub.seen
    await runner.cleanup()


@pytest.mark.parametrize(("mode", "role"), [("prefill", Role.BOTH), ("null", Role.DECODE)])
async def test_a_role_that_the_server_has_not_is_refused(mode: str, role: Role) -> None:
    stub = SglangStub("a", mode=mode)
    runner = await stub.start()
    worker = AttachedWorker(id="a", url=stub.url, role=role)
    with pytest.raises(FleetError, match="--disaggregation-mode"):
        async with running(0, 0, 0, attach=(worker,), template=None):
            pass
    await runner.cleanup()


def test_servers_of_different_engines_make_no_pair() -> None:
    vllm = Engine(stock=True, model="m")
    workers = [(Role.PREFILL, replace(vllm, family="sglang")), (Role.DECODE, vllm)]
    with pytest.raises(FleetError, match="different engines"):
        check_fit(workers)
    check_fit([(Role.BOTH, engine) for _, engine in workers])


async def test_a_client_that_wants_ids_of_a_chat_stream_is_told_that_there_are_none() -> None:
    async with attached(SglangStub("a")) as (_, client):
        status, body = await client.post(
            "/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], stream=True,
            return_token_ids=True,
        )  # fmt: skip
        assert status == 400
        assert "return_token_ids" in str(body)


@pytest.mark.parametrize("chat", [False, True])
async def test_a_request_for_an_adapter_names_it_where_the_server_reads_it(chat: bool) -> None:
    """By `model` alone SGLang serves the base model, without a word."""
    stub = SglangStub("a", adapters=("tuned",))
    async with attached(stub) as (_, client):
        await said(client, chat=chat, stream=False, model="tuned")
        await said(client, chat=chat, stream=False, model="stub")
    assert [seen.body.get("lora_path") for seen in stub.seen] == ["tuned", None]
    assert stub.seen[0].body["model"] == "tuned"


async def test_ids_of_a_completion_are_passed_on() -> None:
    async with attached(SglangStub("a"), Stub("b", stock=True)) as (_, client):
        chunks = await client.reply(max_tokens=4, ignore_eos=None, return_token_ids=True)
        ids = [i for c in chunks[:-1] for i in c["choices"][0].get("token_ids") or []]
        assert ids == [BASE + i for i in range(4)]
