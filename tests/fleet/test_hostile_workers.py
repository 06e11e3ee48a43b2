"""Laws of what workers say: nothing of it ends a member, a subscriber or a task; fuzzed."""

from __future__ import annotations

import asyncio
import logging
import math
from typing import Any

import msgspec
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from tests.fleet.test_attached_member import attached, until
from tests.fleet.test_kv_event_subscriber import subscribed
from tests.gateway.stub import Stub, whole_text
from tests.lib.kv_event_batch import decode_batch

from pigou.background import Background
from pigou.config import ControlConfig
from pigou.control.messages import CacheChanged, WorkerUp
from pigou.control.plane import ControlPlane
from pigou.fleet.probe import (
    _json,
    _number,
    _publishes,
    _source,
    read_startup_profile,
)
from pigou.fleet.worker_report import metrics_progress, read_load
from pigou.request import Role, Worker
from pigou.wire import metrics_text
from pigou.wire.kv_event_decoding import EventError, sequence_frame

SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=8)
    | st.binary(max_size=20)
)  # fmt: skip
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner),
    max_leaves=9,
)
FIELDS = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "medium", "lora_name",
          "extra_keys", "cache_salt")  # fmt: skip
KINDS = st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "Other"])
PLAUSIBLE = {
    "block_hashes": [1, 2], "parent_block_hash": None, "token_ids": [3] * 32, "block_size": 16,
    "medium": None, "lora_name": None, "extra_keys": None, "cache_salt": None,
}  # fmt: skip
EVENTS = st.builds(
    lambda kind, wrong: {"type": kind, **PLAUSIBLE, **wrong},
    KINDS, st.dictionaries(st.sampled_from(FIELDS), ANYTHING, max_size=2),
)  # fmt: skip
VALUES = st.sampled_from(["NaN", "+Inf", "-Inf", "1e400", "-3", "0.5", "x", "9" * 5000, "1e308"])


def deep(depth: int) -> bytes:
    return b"\x91" * depth + b"\xc0"


@given(st.binary(max_size=100))
def test_no_bytes_raise_anything_but_an_event_error(payload: bytes) -> None:
    for each in (payload, deep(200_000), b"\x93\xcb\x7f\xf8" + b"\0" * 6 + payload):
        try:
            decode_batch(each)
        except EventError:
            continue


@given(st.lists(EVENTS | ANYTHING, max_size=3))
def test_every_batch_is_refused_or_can_be_applied(events: list[Any]) -> None:
    plane = ControlPlane(ControlConfig())
    plane.observe(WorkerUp(Worker("a", "http://x", Role.BOTH, 16, 100, 4, True)), 0)
    try:
        batch = decode_batch(msgspec.msgpack.encode([1.0, events]))
    except EventError:
        return
    plane.observe(CacheChanged("a", batch.events), 1)


NAMES = st.sampled_from(["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"])


@given(st.lists(st.tuples(NAMES, VALUES)), st.binary())
def test_every_metrics_page_is_a_load_within_bounds(
    rows: list[tuple[str, str]], rest: bytes
) -> None:
    page = "".join(f"vllm:{name} {value}\n" for name, value in rows).encode() + rest
    load = read_load(page, "a")
    assert 0 <= load.running <= 2**20
    assert 0 <= load.waiting <= 2**20
    assert 0 <= load.kv_usage <= 1
    assert math.isfinite(load.kv_usage)
    label = f'vllm:cache_config_info{{block_size="{"9" * 5000}",num_gpu_blocks="7"}} 1\n'.encode()
    assert metrics_text.cache_config(label) == {"num_gpu_blocks": 7}


class Pattern:
    """A pattern that notes how many bytes it is tried on."""

    def __init__(self, pattern: Any) -> None:
        self._pattern = pattern
        self.read = 0

    def fullmatch(self, line: bytes) -> Any:
        self.read += len(line)
        return self._pattern.fullmatch(line)


@pytest.mark.parametrize(
    "more",
    [
        b'vllm:x{a="' + b"b" * 1_000_000,
        b"vllm:x{" + b"} a" * 300_000 + b" ",
        b"vllm:x 1\n" * 100_000,
        b"vllm:num_requests_running{" + b"} a" * 300_000 + b" ",
        b"vllm:num_requests_waiting_x 1\n" * 100_000,
    ],
)
def test_of_a_long_metrics_page_only_the_few_lines_that_matter_are_parsed(
    more: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    pattern = Pattern(metrics_text._SAMPLE)
    monkeypatch.setattr(metrics_text, "_SAMPLE", pattern)
    page = b'vllm:num_requests_running{engine="0"} 3.0\n' + more + b"\n"
    assert read_load(page, "a").running == 3
    sign = metrics_progress(page, owed=0, planned_tokens=0)
    assert sign is not None
    assert sign.busy
    assert metrics_text.cache_config(page) == {}
    assert pattern.read < 100_000


@given(ANYTHING, st.binary(max_size=50))
def test_every_description_is_taken_or_left(told: Any, body: bytes) -> None:
    read_startup_profile(told)
    assert 0 <= _number(told) < 2**31
    _json(body)
    _json(b"[" * 200_000)
    for value in (told, {"endpoint": told}, {"endpoint": "tcp://*:1", "topic": told}):
        if _publishes(value):
            _source(value, "127.0.0.1")


HOSTILE = [
    msgspec.msgpack.encode([1.0, [{"type": "BlockStored", **PLAUSIBLE, "medium": {"a": 1}}]]),
    msgspec.msgpack.encode([1.0, [{"type": "BlockStored", **PLAUSIBLE, "token_ids": ["x"] * 32}]]),
    msgspec.msgpack.encode([1.0, [{"type": "BlockRemoved", "block_hashes": [1.5]}]]),
    msgspec.msgpack.encode([{}, []]),
    deep(100_000), b"", b"\xc1", b"\x00" * 1000,
]  # fmt: skip


async def test_a_subscriber_that_met_hostile_batches_applies_the_valid_ones_after_them() -> None:
    async with subscribed([]) as (publisher, sink):
        await publisher.send(0)
        await sink.reaches([0])
        for number, payload in enumerate(HOSTILE, 1):
            await publisher.pub.send_multipart([b"kv", sequence_frame(number), payload])
        for frames in ([b"kv"], [b"kv", b"short", b"x"], [b"kv", b"\xff" * 8, b"x"], [b"kv"] * 9):
            await publisher.pub.send_multipart(frames)
        await publisher.send(len(HOSTILE) + 1)
        await sink.reaches([0, *["lost"] * len(HOSTILE), len(HOSTILE) + 1])


async def test_a_member_whose_metrics_are_hostile_stays_and_its_load_is_read_again() -> None:
    class Raving(Stub):
        raves = True

        async def _tell(self, request: web.Request) -> web.Response:
            if request.path == "/metrics" and self.raves:
                return web.Response(body=b"vllm:num_requests_running NaN\n"
                                         b"vllm:kv_cache_usage_perc 1e999\n\xff\xfe\n")  # fmt: skip
            return await super()._tell(request)

    stub = Raving("a")
    async with attached(stub) as (serving, client):
        assert (await client.workers())["a"]["state"] == "up"
        for _ in range(10):
            await asyncio.sleep(0.1)
        stub.raves = False
        await until(client, lambda rows: rows["a"]["kv_usage"] == 0.25)
        assert (await client.workers())["a"]["restarts"] == 0
        chunks = await client.reply(max_tokens=3, ignore_eos=None)
        assert "".join(c["choices"][0]["text"] for c in chunks if c.get("choices")) == whole_text(3)
        assert not serving.plane_driver.background.failing


async def test_a_task_that_fails_is_logged_shown_and_started_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    background, over = Background(0.01, 0.02), asyncio.Event()
    runs = 0

    async def work() -> None:
        nonlocal runs
        runs += 1
        if runs < 4:
            raise ValueError(f"run {runs}")
        over.set()
        await asyncio.sleep(3600)

    with caplog.at_level(logging.ERROR, "pigou.background"):
        task = background.start("worker", work)
        await asyncio.wait_for(over.wait(), 60)
    assert background.view() == [
        {"name": "worker", "state": "running", "restarts": 3, "error": "ValueError: run 3"}
    ]
    assert [bool(record.exc_info) for record in caplog.records] == [True] * 3
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert background.view() == []


def test_a_thread_that_fails_is_started_again() -> None:
    background, runs = Background(0.01, 0.02), []

    def work() -> None:
        runs.append(1)
        if len(runs) < 3:
            raise KeyError(len(runs))

    thread = background.thread("thread", work)
    thread.start()
    thread.join(30)
    assert len(runs) == 3
