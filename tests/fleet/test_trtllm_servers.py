"""Laws of TensorRT-LLM servers behind the gateway: learnt, loaded, two legs, events by poll."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fleet.harness import WATCH, attached, running, until
from tests.fleet.test_sglang_servers import said
from tests.fleet.trtllm_stub import ITERATION, TrtllmStub
from tests.gateway.stub import Stub, whole_text

from pigou.fleet.config import AttachedWorker, FleetError
from pigou.fleet.worker_report import metrics_progress, read_load
from pigou.request import Role
from pigou.wire.kv_event_decoding import EventError, Removed, Stored, polled_events
from pigou.wire.metrics_text import vllm_names


def stored(number: int, *blocks: tuple[int, int], parent: int | None = None) -> dict[str, Any]:
    """An event with blocks of (hash, tokens)."""
    told = [
        {"type": "stored_block", "block_hash": name, "cache_level": 0, "priority": 35,
         "tokens": [{"type": "unique_token", "token_id": 10 * name + i, "token_extra_id": 0}
                    for i in range(size)]}
        for name, size in blocks
    ]  # fmt: skip
    data = {"type": "stored", "parent_hash": parent, "blocks": told}
    return {"event_id": number, "data": data, "window_size": 4096}


def page(*events: dict[str, Any]) -> bytes:
    return msgspec.json.encode(events)


def test_polled_events_are_those_of_vllm() -> None:
    change = {"type": "event_diff", "old_value": 0, "new_value": 1}
    created = {"event_id": 0, "window_size": 4096,
               "data": {"type": "created", "num_blocks_per_cache_level": [10, 5]}}  # fmt: skip
    updated = {"event_id": 2, "window_size": 4096,
               "data": {"type": "updated", "block_hash": 2, "cache_level": change}}  # fmt: skip
    removed = {"event_id": 3, "window_size": 4096,
               "data": {"type": "removed", "block_hashes": [2]}}  # fmt: skip
    found = list(polled_events(page(created, stored(1, (2, 4), (3, 4), (4, 1), parent=1), updated,
                                    removed), 4))  # fmt: skip
    assert [each.id for each in found] == [0, 1, 2, 3]
    (blocks,) = found[1].events
    assert blocks == Stored((2, 3), 1, (20, 21, 22, 23, 30, 31, 32, 33), 4)
    assert found[2].events == (Stored((2,), None, (), 4, "CPU"), Removed((2,), None))
    assert found[3].events == (Removed((2,), None), Removed((2,), "CPU"))


events = st.dictionaries(st.sampled_from(["event_id", "data"]), st.none() | st.integers())


@given(st.binary() | st.lists(events).map(lambda found: page(*found)))
def test_what_is_no_event_is_told_by_one_error(answer: bytes) -> None:
    with suppress(EventError):
        list(polled_events(answer, 4))


def test_blocks_larger_than_told_are_refused() -> None:
    with pytest.raises(EventError, match="attach the server anew"):
        list(polled_events(page(stored(0, (1, 8))), 4))


def test_iterations_are_read_as_load_and_progress() -> None:
    load = read_load(page({"iter": 1, "numActiveRequests": 9}, ITERATION), "a")
    assert (load.running, load.waiting, load.kv_usage) == (3, 1, 0.25)
    later = metrics_progress(page({**ITERATION, "iter": 155}), owed=1, planned_tokens=0)
    before = metrics_progress(page(ITERATION), owed=1, planned_tokens=0)
    assert before is not None
    assert later is not None
    assert later.mark != before.mark
    assert vllm_names(b"[]") == b"[]"
    for broken in (b"[{broken", b'[{"iter": 1}]', b'[{"numActiveRequests": "x"}]',
                   b'[{"numActiveRequests": 1, "kvCacheStats": [1]}]', b"[{}, 3]"):  # fmt: skip
        assert vllm_names(broken) == b"", broken


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chat", [False, True])
async def test_requests_are_such_as_it_accepts(chat: bool, stream: bool) -> None:
    stub = TrtllmStub("a")
    async with attached(stub) as (serving, client):
        (worker,) = serving.plane_driver.plane.state.workers
        assert (worker.block_size, worker.blocks) == (4, 1000)
        assert await said(client, chat=chat, stream=stream) == whole_text(6)


@pytest.mark.parametrize("finish", ["not_finished", "stop"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chat", [False, True])
async def test_the_context_servers_ticket_goes_to_the_generation_server(
    chat: bool, stream: bool, finish: str
) -> None:
    stubs = [TrtllmStub("p", finish=finish), TrtllmStub("d")]
    runners = [await stub.start() for stub in stubs]
    workers = tuple(
        AttachedWorker(id=stub.name, url=stub.url, role=role)
        for stub, role in zip(stubs, (Role.PREFILL, Role.DECODE), strict=True)
    )
    async with running(0, 0, 0, attach=workers, watch=WATCH, template=None) as (_, client):
        await until(client, lambda rows: all(row["state"] == "up" for row in rows.values()))
        long = "a prompt of several blocks of four tokens, so that it is computed apart"
        fields = {"messages": [{"role": "user", "content": long}]} if chat else {"prompt": long}
        assert await said(client, chat=chat, stream=stream, **fields) == whole_text(6)
    for runner in runners:
        await runner.cleanup()
    first = stubs[0].seen
    assert not first or "disaggregated_params" in first[0].body
    assert stubs[1].seen[0].body["stream"] is stream
    ticket = stubs[1].seen[0].body.get("disaggregated_params")
    assert (ticket is not None) == (bool(first) and finish == "not_finished")


async def test_events_are_polled_and_missed_ones_are_noticed() -> None:
    stub = TrtllmStub("a", polls=[[stored(0, (1, 4), (2, 4))], [stored(2, (3, 4), parent=2)]])
    runner = await stub.start()
    worker = AttachedWorker(id="a", url=stub.url, events="poll")
    async with running(0, 0, 0, attach=(worker,), watch=WATCH, template=None) as (serving, client):
        index = serving.plane_driver.plane.index
        await until(client, lambda _: index.cache("a").event_gaps == 1)
        await until(client, lambda _: index.cache("a").blocks == 1)
    await runner.cleanup()


async def test_events_of_another_server_cannot_be_polled() -> None:
    stub = Stub("a", stock=True)
    runner = await stub.start()
    worker = AttachedWorker(id="a", url=stub.url, events="poll")
    with pytest.raises(FleetError, match="events=poll"):
        async with running(0, 0, 0, attach=(worker,), template=None):
            pass
    await runner.cleanup()
