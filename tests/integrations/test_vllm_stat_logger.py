"""Laws of pushed loads: newest wins, in place of polled ones while fresh, bounded, encrypted."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from tests.fleet.harness import WATCH, running
from tests.gateway.stub import Stub

from benchmarks.lib.peers import PeerMissing, vllm_home
from benchmarks.lib.servers import free_ports
from pigou.config import ConfigError
from pigou.fleet.config import AttachedWorker
from pigou.fleet.kv_event_subscriber import read_pushed_load
from pigou.fleet.probe import EventSource
from pigou.fleet.worker_report import read_load
from pigou.wire.fleet_secret import FleetSecret

SECRET = "a secret of more than sixteen characters"


class StatLoggerBase(ABC):
    """vLLM's, as of 0.32."""

    @abstractmethod
    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None: ...

    @abstractmethod
    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None: ...  # fmt: skip

    @abstractmethod
    def log_engine_initialized(self) -> None: ...


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The plug-in, imported beside a vLLM that has nothing but the base class."""
    for name in ("vllm", "vllm.v1", "vllm.v1.metrics", "vllm.v1.metrics.loggers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["vllm.v1.metrics.loggers"].StatLoggerBase = StatLoggerBase  # type: ignore[attr-defined]
    name = "pigou.integrations.vllm.stat_logger"
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name)
    sys.modules.pop(name, None)


def step(running: int, waiting: int = 0, usage: float = 0.5) -> tuple[Any, Any]:
    """Return a step's statistics: one preemption, 10 tokens computed, 3 made."""
    return (
        SimpleNamespace(num_running_reqs=running, num_waiting_reqs=waiting,
                        num_skipped_waiting_reqs=1, kv_cache_usage=usage),
        SimpleNamespace(num_preempted_reqs=1, num_generation_tokens=3,
                        prompt_token_stats=SimpleNamespace(computed=10)),
    )  # fmt: skip


def address() -> str:
    return f"tcp://127.0.0.1:{free_ports(1)[0]}"


@asynccontextmanager
async def read(source: EventSource) -> AsyncIterator[list[bytes]]:
    pages: list[bytes] = []
    task = asyncio.create_task(read_pushed_load(source, pages.append))
    yield pages
    task.cancel()


async def until_any(pages: list[Any], send: Any) -> None:
    for _ in range(400):
        send()
        await asyncio.sleep(0.025)
        if pages:
            return
    raise AssertionError("nothing arrived")


async def test_steps_within_20_ms_are_one_message_and_the_last_is_always_sent(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = address()
    monkeypatch.setenv(module.VARIABLE, endpoint)
    loggers = [module.PigouStatLogger(None, index) for index in (0, 1)]
    async with read(EventSource(endpoint)) as pages:
        await until_any(pages, lambda: loggers[0].record(*step(1)))
        loggers[1].record(*step(3, waiting=2, usage=0.25))
        await asyncio.sleep(0.05)
        pages.clear()
        for count in range(200, 4, -1):
            loggers[0].record(*step(count))
        loggers[0].record(None, step(0)[1])  # a step without statistics of the scheduler
        await asyncio.sleep(0.2)
    assert 1 <= len(pages) <= 3
    load = read_load(pages[-1], "w")
    assert (load.running, load.waiting, load.kv_usage) == (5 + 3, 1 + 3, (0.5 + 0.25) / 2)
    assert b'vllm:num_preemptions_total{engine="1"} 1\n' in pages[-1]
    assert b'vllm:generation_tokens_total{engine="1"} 3\n' in pages[-1]


async def test_recording_never_blocks_and_costs_microseconds_whoever_listens(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(module.VARIABLE, address())
    logger = module.PigouStatLogger(None)
    began_s = time.process_time()
    for count in range(2000):
        logger.record(*step(count))
    assert time.process_time() - began_s < 0.5


def test_without_its_variable_or_with_a_taken_port_it_does_nothing(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(module.VARIABLE, raising=False)
    module.PigouStatLogger(None).record(*step(1))
    assert not caplog.records
    with zmq.Context() as context, context.socket(zmq.PUB) as taken:
        port = taken.bind_to_random_port("tcp://127.0.0.1")
        monkeypatch.setenv(module.VARIABLE, f"tcp://127.0.0.1:{port}")
        module.PigouStatLogger(None).record(*step(1))
    assert module.VARIABLE in caplog.text


async def test_an_encrypted_load_is_read_with_the_secret_alone(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = address()
    monkeypatch.setenv(module.VARIABLE, endpoint)
    monkeypatch.setenv("PIGOU_FLEET_SECRET", SECRET)
    logger = module.PigouStatLogger(None)
    assert os.environ["PIGOU_FLEET_SECRET"] == SECRET, "other plug-ins of the server read it too"
    other = EventSource(endpoint, secret=FleetSecret("another secret of the same length"))
    own = EventSource(endpoint, secret=FleetSecret(SECRET))
    async with read(other) as strange, read(EventSource(endpoint)) as plain, read(own) as pages:
        await until_any(pages, lambda: logger.record(*step(1)))
    assert not strange
    assert not plain


async def test_an_address_where_nobody_pushes_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pigou.fleet.kv_event_subscriber._UNMET_S", 0.05)
    async with read(EventSource(address())):
        await asyncio.sleep(0.3)
    assert "PIGOU_LOAD" in caplog.text


@pytest.mark.parametrize("load", ["http://h:1", "tcp:/h", "", "curve+http://h:1"])
def test_an_address_that_is_none_is_refused(load: str) -> None:
    with pytest.raises(ConfigError, match="load is"):
        AttachedWorker.parse(f"http://h:1,load={load}", 0)


async def test_a_pushed_load_replaces_the_polled_one_while_it_is_fresh_and_garbage_never_does() -> (
    None
):
    stub = Stub("a", stock=True)
    runner = await stub.start()
    publisher = zmq.asyncio.Context.instance().socket(zmq.PUB)
    publisher.setsockopt(zmq.LINGER, 0)
    port = publisher.bind_to_random_port("tcp://127.0.0.1")
    worker = AttachedWorker(id="a", url=stub.url, load=f"tcp://127.0.0.1:{port}")
    watch = msgspec.structs.replace(WATCH, every=0.3)
    try:
        async with running(0, 0, 0, attach=(worker,), watch=watch) as (serving, _):
            state = serving.plane_driver.plane.state

            def figures() -> tuple[int, int, float]:
                load = state.figures("a")
                return load["running"], load["waiting"], load["kv_usage"]

            async def pushed(page: bytes, seconds: float = 0.5) -> set[tuple[int, int, float]]:
                seen = set()
                for _ in range(round(seconds / 0.02)):
                    await publisher.send(page)
                    await asyncio.sleep(0.02)
                    seen.add(figures())
                return seen

            async def becomes(page: bytes, load: tuple[int, int, float]) -> None:
                for _ in range(40):
                    if load in await pushed(page):
                        return
                raise AssertionError(f"{figures()} is not {load}")

            page = b"vllm:num_requests_running 7\nvllm:num_requests_waiting 9\n"
            await becomes(page + b"vllm:kv_cache_usage_perc 0.75\n", (7, 9, 0.75))
            assert await pushed(page + b"vllm:kv_cache_usage_perc 0.75\n") == {(7, 9, 0.75)}
            await becomes(b"", (0, 0, 0.25))  # the page counts again
            wild = b"vllm:num_requests_running 1e300\nvllm:num_requests_waiting -1\n"
            await becomes(wild + b"vllm:kv_cache_usage_perc nan\n", (2**20, 0, 0.0))
            await becomes(b"", (0, 0, 0.25))
            garbage = [b"", b"\x00" * 64, b"vllm:num_requests_running", b"{}" * 1000]
            garbage.append(page * 1000)  # too long: the connection ends, and polls go on
            for each in garbage:
                assert await pushed(each, 0.1) == {(0, 0, 0.25)}
    finally:
        publisher.close()
        await runner.cleanup()


CONTRACT = """
import dataclasses, inspect
from vllm.v1.metrics.loggers import StatLoggerBase, load_stat_logger_plugin_factories
from vllm.v1.metrics.stats import IterationStats, SchedulerStats
from pigou.integrations.vllm.stat_logger import PigouStatLogger
assert PigouStatLogger in load_stat_logger_plugin_factories(), "found by its entry point"
for name in StatLoggerBase.__abstractmethods__:
    theirs, ours = (inspect.signature(getattr(c, name)) for c in (StatLoggerBase, PigouStatLogger))
    assert list(theirs.parameters) == list(ours.parameters), (name, theirs, ours)
logger = PigouStatLogger(None, 0)
logger.record(SchedulerStats(num_running_reqs=2), IterationStats())
logger.log(), logger.record_sleep_state(0, 0), logger.log_engine_initialized()
print("holds")
"""


@pytest.mark.vllm
@pytest.mark.slow
def test_the_plug_in_fits_the_installed_vllm() -> None:
    try:
        home = vllm_home()
    except PeerMissing as missing:
        pytest.skip(str(missing))
    done = subprocess.run(
        [str(home / "bin" / "python"), "-c", CONTRACT],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths())},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.stdout.endswith("holds\n"), done.stderr[-2000:]


def paths() -> list[str]:
    """The folders of Pigou and of its entry points, without this environment's packages."""
    source = Path(inspect.getfile(importlib.import_module("pigou"))).parents[1]
    folders = [source, *(Path(path) for path in sys.path if path and Path(path).name == ".meta")]
    if len(folders) == 1:  # entry points of an installation
        installed = importlib.import_module("importlib.metadata").distribution("pigou")
        folders.append(Path(str(installed.locate_file(""))))
    return [str(folder) for folder in folders]
