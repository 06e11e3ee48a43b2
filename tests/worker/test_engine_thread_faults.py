"""Laws of faults within a worker: they end one request, not the process, and leave no block."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from pigou.engine.plan import Finish, Plan, Result
from pigou.request import FinishReason
from pigou.runtime.step_output import StepOutput
from pigou.worker.config import WorkerConfig
from pigou.worker.engine_thread.commands import OnStep
from pigou.worker.engine_thread.mock_worker import MockBackend, TimingLaw
from pigou.worker.process import WorkerServer
from pigou.worker.startup.build import build

#: A prompt that begins with this letter meets the fault.
BAD = "Z"


class Faulty(MockBackend):
    """Fails where it is told to, for prompts that begin with `BAD`, and blocks while told to."""

    place = ""
    gate = threading.Event()

    def add(self, request: str, tokens: list[int], *args: Any, **options: Any) -> None:
        if self.place == "add" and tokens[0] == self.bad:
            raise TypeError("injected")
        super().add(request, tokens, *args, **options)
        if tokens[0] == self.bad:
            self.victims.add(request)

    def prepare(self, bad: int) -> None:
        self.bad = bad
        self.victims: set[str] = set()

    def execute(self, plan: Plan, on_step: OnStep | None = None) -> Result:
        if self.place == "block":
            self.gate.wait(60)
        if self.place != "step":
            return super().execute(plan, on_step)
        broken: dict[int, str] = {}

        def told(step: StepOutput) -> bool:
            for entry, row in enumerate(plan.rows.tolist()):
                if self._rows[row] in self.victims:
                    broken[entry] = step.broken[entry] = "IndexError: injected"
                    step.tokens[entry], step.finished[entry] = -1, True
            return (on_step is None or on_step(step)) and not broken

        result = super().execute(plan, told)
        result.finished = [
            *(f for f in result.finished if f.entry not in broken),
            *(Finish(entry, FinishReason.ERROR, result.steps) for entry in broken),
        ]
        return result


async def post(session: aiohttp.ClientSession, prompt: str, **fields: Any) -> tuple[int, str]:
    body = {"prompt": prompt, "max_tokens": 12, "ignore_eos": True, **fields}
    async with session.post("/v1/completions", json=body) as reply:
        return reply.status, await reply.text()


class Ground:
    """A worker within this process."""

    def __init__(self, folder: Path) -> None:
        config = WorkerConfig(
            model=str(folder), executor="sleep", port=0, repeat=4, blocks=64, kv_transfer="none"
        )
        parts = build(config)
        self.backend = Faulty(TimingLaw(5_000_000, 0, 1e9), 16, 300, frozenset(), first=10)
        self.backend.prepare(parts.model.tokenizer.encode(BAD)[0])
        self.process = WorkerServer(config, replace(parts, backend=self.backend))
        self.core = parts.core

    async def __aenter__(self) -> aiohttp.ClientSession:
        self.serving = asyncio.create_task(self.process.serve())
        while self.process._listener is None:
            assert not self.serving.done(), self.serving.exception()
            await asyncio.sleep(0.01)
        port = self.process._listener.sockets[0].getsockname()[1]
        self.session = aiohttp.ClientSession(
            f"http://127.0.0.1:{port}", timeout=aiohttp.ClientTimeout(total=30)
        )
        return self.session

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()
        self.backend.gate.set()
        self.process.stop()
        assert await self.serving == 0
        self.core.check_integrity()
        assert self.core.usage == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("place", ["add", "step", "reply"])
async def test_a_fault_of_one_request_ends_that_one_and_the_worker_serves_on(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, place: str, stream: bool
) -> None:
    ground = Ground(model_folder)
    ground.backend.place = place
    async with ground as session:
        if place == "reply":
            _mark(monkeypatch, ground)
        others = [post(session, f"good {i}") for i in range(3)]
        results = await asyncio.gather(post(session, BAD, stream=stream), *others)
        status, text = results[0]
        assert "injected" in text
        assert '"RequestFailedError"' in text
        assert status == (500 if not stream or place != "reply" else status)
        for status, text in results[1:]:
            assert (status, json.loads(text)["usage"]["completion_tokens"]) == (200, 12)
        async with session.get("/health") as reply:
            assert reply.status == 200
        assert (await post(session, "good again"))[0] == 200


def _mark(monkeypatch: pytest.MonkeyPatch, ground: Ground) -> None:
    """Let the fault meet replies whose prompt begins with `BAD` alone."""
    service = ground.process._service
    submit = service.submit

    def submitted(reply: Any, pairs: Any) -> None:
        for sequence, _ in pairs:
            if sequence.prompt[0] == ground.backend.bad:
                sequence.choice = _Broken(sequence.choice)
        submit(reply, pairs)

    monkeypatch.setattr(service, "submit", submitted)


class _Broken:
    """A choice whose text cannot be told."""

    def __init__(self, choice: Any) -> None:
        self._choice = choice

    def __getattr__(self, name: str) -> Any:
        return getattr(self._choice, name)

    def take(self, token: int) -> str:
        raise UnicodeError(f"injected at {token}")


async def test_an_engine_that_blocks_says_so_and_one_that_waits_is_idle(model_folder: Path) -> None:
    ground = Ground(model_folder)
    async with ground as session:
        async with session.get("/health") as reply:
            idle = (await reply.json())["engine"]
        ground.backend.gate.clear()
        ground.backend.place = "block"
        asked = asyncio.create_task(post(session, "good"))
        views: list[dict[str, Any]] = []
        while len(views) < 3 or views[-1]["beats"] != views[-3]["beats"]:
            async with session.get("/health") as reply:
                views.append((await reply.json())["engine"])
            if not views[-1]["busy"]:
                views.clear()
            await asyncio.sleep(0.02)
        assert not idle["busy"]
        assert views[-1]["busy"]
        assert views[-1]["planned_tokens"] > 0
        ground.backend.gate.set()
        assert (await asked)[0] == 200


async def test_a_long_step_that_makes_progress_beats(model_folder: Path) -> None:
    ground = Ground(model_folder)
    ground.backend._timing = TimingLaw(2_500_000_000, 0, 1e9)
    async with ground as session:
        asked = asyncio.create_task(post(session, "good", max_tokens=1))
        beats = set()
        while not asked.done():
            async with session.get("/health") as reply:
                view = (await reply.json())["engine"]
            if view["busy"] and view["planned_tokens"]:
                beats.add(view["beats"])
            await asyncio.sleep(0.05)
        assert (await asked)[0] == 200
        assert len(beats) >= 3
