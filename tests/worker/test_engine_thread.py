"""The engine thread: commands, reports, and its death, seen from inside the process."""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from pigou.config import EngineConfig
from pigou.engine.core import EngineCore
from pigou.engine.plan import Plan, Result
from pigou.request import FinishReason, Grammar, Request, SamplingParams
from pigou.worker.config import WorkerConfig
from pigou.worker.engine_thread.commands import Abort, Add, OnStep, Report, Stop
from pigou.worker.engine_thread.engine_thread import EngineThread
from pigou.worker.engine_thread.mock_worker import MockBackend, TimingLaw
from pigou.worker.kv_transfer.connector import Transfers
from pigou.worker.process import WorkerServer
from pigou.worker.startup.build import build


class Engine:
    """An engine thread whose reports are collected."""

    def __init__(self, **options: Any) -> None:
        config = EngineConfig(blocks=64, max_repeat=8, max_model_len=512, **options)
        self.core = EngineCore(config)
        self.reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self.crashes: list[BaseException] = []
        backend = MockBackend(TimingLaw(2_000_000, 0, 1e9), 16, 100, frozenset())
        self.thread = EngineThread(
            self.core, backend, self.reports.put, self.crashes.append, events=True
        )
        self.thread.transfers = Transfers(self.thread.put)
        self.thread.start()

    def add(self, name: str, tokens: int = 20, most: int = 10, **params: Any) -> None:
        request = Request(name, tokens, most, arrival=time.monotonic_ns())
        sampling = SamplingParams(max_tokens=most, **params)
        self.thread.put(Add(request, list(range(tokens)), sampling, 0, b"seed"))

    def until_finished(self, names: set[str]) -> list[Report]:
        taken = []
        while names:
            report = self.reports.get(timeout=20)
            taken.append(report)
            names = names - {f.request for f in (*report.finished, *report.failed)}
        return taken

    def close(self) -> None:
        self.thread.put(Stop())
        assert self.thread.join(10)
        self.core.check_integrity()


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.close()


def test_every_token_is_reported_once_and_in_order(engine: Engine) -> None:
    engine.add("a", most=30)
    engine.add("b", most=7)
    reports = engine.until_finished({"a", "b"})
    for name, count in (("a", 30), ("b", 7)):
        tokens = [token for r in reports for request, token, _ in r.tokens if request == name]
        assert len(tokens) == count
        last = max(i for i, r in enumerate(reports) if any(t[0] == name for t in r.tokens))
        done = next(i for i, r in enumerate(reports) if any(f.request == name for f in r.finished))
        assert last <= done


def test_the_steps_of_a_repeat_are_reported_one_by_one(engine: Engine) -> None:
    engine.add("a", most=30)
    reports = engine.until_finished({"a"})
    assert all(len(report.tokens) <= 1 for report in reports)


def test_an_abort_ends_a_request_and_frees_its_blocks(engine: Engine) -> None:
    engine.add("a", most=400)
    while not engine.reports.get(timeout=20).tokens:
        pass
    engine.thread.put(Abort("a"))
    reports = engine.until_finished({"a"})
    assert reports[-1].finished[0].reason is FinishReason.ABORT
    assert engine.core.free_blocks == 64


@pytest.mark.parametrize(
    ("fields", "status"),
    [({"tokens": 500, "most": 100}, 400), ({"grammar": Grammar("regex", "a")}, 400)],
)
def test_what_cannot_run_is_reported_as_failed(engine: Engine, fields: Any, status: int) -> None:
    engine.add("a", **fields)
    failed = engine.until_finished({"a"})[-1].failed[0]
    assert failed.status == status
    engine.add("b")
    engine.until_finished({"b"})


def test_a_taken_id_is_refused_and_its_owner_goes_on(engine: Engine) -> None:
    engine.add("a", most=20)
    engine.add("a", most=20)
    reports = engine.until_finished({"a"})
    assert [f.status for r in reports for f in r.failed] == [400]
    while not any(f.request == "a" for r in reports for f in r.finished):
        reports.append(engine.reports.get(timeout=20))


class Crashing(MockBackend):
    """A backend whose second step fails."""

    steps = 0

    def execute(self, plan: Plan, on_step: OnStep | None = None) -> Result:
        self.steps += 1
        if self.steps > 2:
            raise RuntimeError("the device is gone")
        return super().execute(plan, on_step)


def test_a_dead_engine_ends_streams_with_an_error_and_the_process(
    model_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = WorkerConfig(
        model=str(model_folder), executor="sleep", port=0, repeat=1, blocks=64, kv_transfer="none"
    )
    parts = build(config)
    law = TimingLaw(20_000_000, 0, 1e9)
    parts = replace(parts, backend=Crashing(law, 16, 300, frozenset(), first=10))

    async def main() -> tuple[str, int, int]:
        process = WorkerServer(config, parts)
        serving = asyncio.create_task(process.serve())
        while process._listener is None:
            await asyncio.sleep(0.01)
        url = f"http://127.0.0.1:{process._listener.sockets[0].getsockname()[1]}"
        async with aiohttp.ClientSession(url) as session:
            body = {"prompt": "a", "max_tokens": 50, "stream": True}
            async with session.post("/v1/completions", json=body) as reply:
                text = await reply.text()
            async with session.get("/health") as reply:
                health = reply.status
        return text, health, await serving

    text, health, status = asyncio.run(main())
    assert '"error":{"message":"The engine died: RuntimeError.' in text
    assert text.endswith("data: [DONE]\n\n")
    assert (health, status) == (503, 1)
    assert '"ready":true' in capfd.readouterr().out
