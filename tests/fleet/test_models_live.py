"""The price planner moves a worker between two models of a live gateway."""

from __future__ import annotations

import asyncio
import random

import pytest
from tests.fleet.harness import Client, running
from tests.fleet.test_planner_live import plan, until_plan

from pigou.control.planner.config import PlannerConfig
from pigou.fleet.config import ModelPoolConfig, WorkersConfig
from pigou.fleet.sources.local import WorkerTemplate, start_workers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
#: A worker computes three prompts of 200 tokens in a second.
SLOW = ("--executor", "sleep", "--sleep-base", "10000000", "--sleep-per-seq", "0",
        "--sleep-prefill-rate", "600", "--repeat", "1")  # fmt: skip
HIGH_RPS, LOW_RPS = 4.4, 0.3


async def load(client: Client, model: str, rate: float, over: asyncio.Event) -> int:
    """Send requests of new prompts until it is over; return how many were answered whole."""
    draw, asked = random.Random(model), []
    while not over.is_set():
        body = {"prompt": [draw.randrange(5, 300) for _ in range(200)], "model": model}
        asked.append(asyncio.create_task(client.reply(**body, max_tokens=8)))
        await asyncio.sleep(1 / rate)
    replies = await asyncio.gather(*asked)
    assert all(chunks[-1] == {} for chunks in replies)
    assert {chunk["model"] for chunks in replies for chunk in chunks if "model" in chunk} == {model}
    return len(replies)


async def test_a_worker_moves_to_the_model_whose_load_rose_and_no_stream_is_lost() -> None:
    pools = tuple(
        ModelPoolConfig(name=name, model="bundled", both=count)
        for name, count in (("ant", 2), ("bee", 1))
    )
    config = WorkersConfig(model_pool=pools, threads=1)
    planner = PlannerConfig(
        slo="ttft=1,itl=0.1", planner={"planner": "price", "hold_s": 4.0}, max_workers=3,
        interval_s=1.0, start_up=3.0,
    )  # fmt: skip
    templates = WorkerTemplate.of_models(config, SLOW)
    workers = tuple(start_workers(templates, config.model_counts))
    async with running(
        0, 0, 0, attach=workers, planner=planner, templates=templates, models=config.models
    ) as (_, client):
        for seconds, rates in ((8.0, (HIGH_RPS, LOW_RPS)), (60.0, (LOW_RPS, HIGH_RPS))):
            over = asyncio.Event()
            loads = [
                asyncio.create_task(load(client, model, rate, over))
                for model, rate in zip(("ant", "bee"), rates, strict=True)
            ]
            if rates[0] == HIGH_RPS:
                await asyncio.sleep(seconds)
            else:
                async with asyncio.timeout(seconds):
                    await until_plan(
                        client, lambda view: (view["replicas"]["both.ant"]["ready"],
                                              view["replicas"]["both.bee"]["ready"]) == (1, 2),
                    )  # fmt: skip
            over.set()
            assert all(await asyncio.gather(*loads))
        shown = await plan(client)
        assert shown["failures"] == 0
        assert list(shown["slo_models"]) == ["ant", "bee"]
        rows = await client.workers()
        assert {row["model"] for row in rows.values()} == {"ant", "bee"}
