"""Laws of requests with several sequences: each is admitted, charged and retried by itself."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from hashlib import sha256
from typing import Any

import aiohttp
import pytest
from stub import Script, Stub, serving, whole_text

from pigou.config import ControlConfig
from pigou.gateway.auth.keys import Key, Keys
from pigou.request import Role

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
BODIES = [
    (TEXT, {"prompt": "x", "n": 3}, 3),
    (TEXT, {"prompt": ["x", "yy", "zzz"]}, 3),
    (TEXT, {"prompt": [[1, 2], [3]], "n": 2}, 4),
    (CHAT, {"messages": MESSAGES, "n": 3}, 3),
]


async def post(fleet: Any, path: str, body: Any, headers: Any = None) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(fleet.url + path, json=body, headers=headers) as response,
    ):
        return response.status, await response.json()


async def events(fleet: Any, path: str, body: Any, headers: Any = None) -> list[dict[str, Any]]:
    """Return the chunks of a stream, which must end with [DONE]."""
    async with (
        aiohttp.ClientSession() as session,
        session.post(fleet.url + path, json=body | {"stream": True}, headers=headers) as response,
    ):
        assert response.status == 200, await response.text()
        lines = [line[6:] for line in (await response.text()).split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    assert lines.count("[DONE]") == 1
    return [json.loads(line) for line in lines[:-1]]


def texts(chunks: list[dict[str, Any]]) -> dict[int, str]:
    found: Counter[int] = Counter()
    told: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            found[choice["index"]] += choice["finish_reason"] is not None
            more = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            told[choice["index"]] = told.get(choice["index"], "") + more
    assert set(found.values()) <= {1}, "each choice ends once"
    return told


async def eventually(check: Any) -> None:
    for _ in range(6000):
        if check():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came")


@pytest.mark.parametrize(("path", "body", "total"), BODIES)
async def test_each_sequence_becomes_a_choice(path: str, body: Any, total: int) -> None:
    async with serving(Stub("a"), Stub("b")) as fleet:
        status, reply = await post(fleet, path, body | {"max_tokens": 4})
        assert status == 200
        assert [choice["index"] for choice in reply["choices"]] == list(range(total))
        assert reply["usage"]["completion_tokens"] == 4 * total
        chunks = await events(fleet, path, body | {"max_tokens": 4})
        assert texts(chunks) == dict.fromkeys(range(total), whole_text(4))
        assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
        await fleet.settle()
        assert fleet.plane_driver.plane.queue.quota.requests == 0


async def test_usage_counts_each_prompt_once_and_each_output() -> None:
    body: dict[str, Any] = {"prompt": ["xx", "yyyy"], "n": 2, "max_tokens": 3}
    async with serving(Stub("a")) as fleet:
        options = {"stream_options": {"include_usage": True}}
        chunks = await events(fleet, TEXT, body | options)
        usages = [chunk["usage"] for chunk in chunks if not chunk["choices"]]
        assert len(usages) == 1
        assert chunks[-1]["usage"] == usages[0]
        assert (usages[0]["prompt_tokens"], usages[0]["completion_tokens"]) == (6, 12)
        reply = (await post(fleet, TEXT, body))[1]
        assert (reply["usage"]["prompt_tokens"], reply["usage"]["total_tokens"]) == (6, 18)


async def test_choice_j_of_a_seeded_request_has_the_seed_plus_j() -> None:
    async with serving(Stub("a")) as fleet:
        await post(fleet, TEXT, {"prompt": ["x", "y"], "n": 2, "seed": 7})
        seen = [(each.body["prompt"], each.body["seed"]) for each in fleet.stubs["a"].seen]
        assert sorted(seen) == [("x", 7), ("x", 8), ("y", 7), ("y", 8)]
        assert all("n" not in each.body for each in fleet.stubs["a"].seen)
        ids = [each.request_id for each in fleet.stubs["a"].seen]
        assert len(set(ids)) == 4, "a stock worker refuses, or mixes up, an id that comes twice"


async def test_a_stream_of_several_choices_goes_on_when_a_worker_dies() -> None:
    async with serving(Stub("a", script=Script(die_after=2, times=1)), Stub("b")) as fleet:
        chunks = await events(fleet, TEXT, {"prompt": "x", "n": 4, "max_tokens": 6})
        assert texts(chunks) == dict.fromkeys(range(4), whole_text(6))


@pytest.mark.parametrize("stream", [False, True])
async def test_few_sequences_of_a_request_are_at_the_workers_at_once(stream: bool) -> None:
    held = asyncio.Event()
    stub = Stub("a", script=Script(held=held))
    control = ControlConfig(max_request_inflight=3)
    async with serving(stub, control=control) as fleet:
        body = {"prompt": ["x"] * 40, "max_tokens": 2}
        ask = events if stream else post
        going = asyncio.create_task(ask(fleet, TEXT, body))
        await eventually(lambda: stub.active == 3)
        assert fleet.plane_driver.plane.queue.quota.requests == 37
        assert len(stub.seen) == 3
        held.set()
        await going
        assert len(stub.seen) == 40
        await fleet.settle()


async def test_another_request_finds_room_beside_one_of_a_thousand_prompts() -> None:
    held = asyncio.Event()
    stub = Stub("a", script=Script(held=held))
    async with serving(stub, control=ControlConfig(max_inflight=16)) as fleet:
        large = asyncio.create_task(
            post(fleet, TEXT, {"prompt": ["x"] * 1000, "max_tokens": 1, "stream": False})
        )
        await eventually(lambda: stub.active >= 1)
        for _ in range(3):  # ticks, in which more of it might go
            await asyncio.sleep(0.1)
        small = asyncio.create_task(post(fleet, TEXT, {"prompt": "mine", "max_tokens": 1}))
        await eventually(lambda: any(seen.body["prompt"] == "mine" for seen in stub.seen))
        assert fleet.plane_driver.queued == 0
        held.set()
        assert (await small)[0] == 200
        status, reply = await large
        assert (status, len(reply["choices"])) == (200, 1000)


async def test_a_client_that_leaves_ends_all_its_sequences() -> None:
    stub = Stub("a", script=Script(held=asyncio.Event()))
    async with serving(stub, control=ControlConfig(max_request_inflight=2)) as fleet:
        going = asyncio.create_task(post(fleet, TEXT, {"prompt": ["x"] * 9}))
        await eventually(lambda: stub.active == 2)
        going.cancel()
        quota = fleet.plane_driver.plane.queue.quota
        await eventually(lambda: fleet.idle() and quota.requests == 0)
        await eventually(lambda: stub.active == 0)
        assert len(stub.seen) == 2


async def test_a_refused_sequence_refuses_the_request() -> None:
    async with serving(Stub("a", script=Script(status=400))) as fleet:
        status, reply = await post(fleet, TEXT, {"prompt": ["x"] * 3})
        assert (status, reply["error"]["message"]) == (400, "scripted")
        await eventually(fleet.idle)


async def test_more_sequences_than_one_request_may_have_are_refused_by_name() -> None:
    async with serving(Stub("a")) as fleet:
        for body, field in (
            ({"prompt": ["x"] * 1025}, "prompt"),
            ({"prompt": ["x"] * 600, "n": 2}, "n"),
        ):
            status, reply = await post(fleet, TEXT, body)
            assert status == 400
            assert "1024" in reply["error"]["message"]
            assert field in reply["error"]["message"]
        assert fleet.stubs["a"].seen == []


async def test_a_request_whose_sequences_find_no_place_in_the_queue_is_refused_whole() -> None:
    held = asyncio.Event()
    stub = Stub("a", script=Script(held=held))
    control = ControlConfig(max_inflight=1, max_queued=10)
    async with serving(stub, control=control) as fleet:
        going = [asyncio.create_task(post(fleet, TEXT, {"prompt": "x"})) for _ in range(2)]
        await eventually(lambda: fleet.plane_driver.queued == 1)
        status, reply = await post(fleet, TEXT, {"prompt": "x", "n": 10})
        assert status == 503
        assert "10 more" in reply["error"]["message"]
        held.set()
        assert [(await each)[0] for each in going] == [200, 200]


async def test_choices_follow_once_their_prompt_is_computed() -> None:
    held = asyncio.Event()
    stub = Stub("d", Role.BOTH, script=Script(held=held))
    async with serving(stub) as fleet:
        going = asyncio.create_task(events(fleet, TEXT, {"prompt": "x" * 64, "n": 4}))
        await eventually(lambda: stub.active == 1)
        for _ in range(3):
            await asyncio.sleep(0.1)
        assert stub.active == 1
        held.set()
        assert len(texts(await going)) == 4


KEYS = Keys([Key("acme", sha256(b"one").digest())])


async def test_tokens_of_all_sequences_count_for_their_tenant() -> None:
    async with serving(Stub("a"), keys=KEYS) as fleet:
        headers = {"authorization": "Bearer one"}
        await post(fleet, TEXT, {"prompt": "x", "n": 3, "max_tokens": 5}, headers)
        await events(fleet, TEXT, {"prompt": "x", "n": 2, "max_tokens": 5}, headers)
        counted = fleet.metrics.generation_tokens.labels("acme")._value.get()
        assert counted == 25


async def test_each_choice_is_prefilled_and_decoded_by_itself() -> None:
    prefill, decode = Stub("p", Role.PREFILL), Stub("d", Role.DECODE)
    async with serving(prefill, decode) as fleet:
        chunks = await events(fleet, TEXT, {"prompt": "long " * 40, "n": 2, "max_tokens": 4})
        assert texts(chunks) == dict.fromkeys(range(2), whole_text(4))
        assert len(decode.seen) == 2
        assert all(each.body["max_tokens"] == 1 for each in prefill.seen)
        await fleet.settle()
