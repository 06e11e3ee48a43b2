"""Prefill workers pull from NATS: workers and the server are killed, and no client notices."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.conftest import SLEEP
from tests.e2e.fleet import Fleet, worker
from tests.lib.server_process import ServerProcess, nats_server

pytest.importorskip("nats")
TOKENS = 6


@pytest.fixture(scope="module")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with nats_server(tmp_path_factory.mktemp("nats")) as server:
        yield server


@pytest.fixture(scope="module")
def pulling(
    nats: ServerProcess, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    """Two prefill workers that pull, 50 ms a prompt, and one decode worker."""
    url = f"{nats.url}/q?lease_s=1"
    slow = (*SLEEP, "--sleep-base", "2000000", "--sleep-prefill-rate", "2000")
    workers = [
        worker("prefill-0", checkpoint, *slow, "--prefill-queue", url),
        worker("prefill-1", checkpoint, *slow, "--prefill-queue", url),
        worker("decode-0", checkpoint, *SLEEP, "--sleep-base", "2000000"),
    ]
    log = tmp_path_factory.mktemp("pulling") / "log"
    fleet = Fleet.start(log, workers, prefill_queue=url)
    yield fleet
    fleet.stop(files=False)  # the next worker may start while a peer holds the killed one's


def ask(fleet: Fleet, number: int) -> tuple[Any, ...]:
    prompt = [number + 3, *range(300, 400)]
    return fleet.stream(
        prompt=prompt, max_tokens=TOKENS, ignore_eos=True, return_token_ids=True
    ).told


def queued(fleet: Fleet) -> float:
    return fleet.metric("pigou_prefill_queue_prompts")


def test_prompts_are_pulled_and_streams_are_whole(pulling: Fleet) -> None:
    with ThreadPoolExecutor(12) as pool:
        replies = list(pool.map(lambda number: ask(pulling, number), range(12)))
    assert {len(reply[1]) for reply in replies} == {TOKENS}
    computed = [pulling.worker(f"prefill-{n}").metric("vllm:prompt_tokens_total") for n in (0, 1)]
    assert min(computed) > 0
    assert sum(computed) == 12 * 101


def test_a_killed_worker_and_a_restarted_server_cost_time_alone(
    pulling: Fleet, nats: ServerProcess
) -> None:
    with ThreadPoolExecutor(16) as pool:
        replies = [pool.submit(ask, pulling, number) for number in range(100, 116)]
        time.sleep(0.15)
        pid = pulling.signal("prefill-0")
        time.sleep(0.2)
        nats.kill()
        time.sleep(0.3)
        nats.start()
        assert {len(reply.result(60)[1]) for reply in replies} == {TOKENS}
    pulling.recovered([pid])
    end = time.monotonic() + 60
    while queued(pulling) and time.monotonic() < end:
        time.sleep(0.1)
    assert queued(pulling) == 0


def test_without_a_server_prompts_are_computed_where_they_are_decoded(
    pulling: Fleet, nats: ServerProcess
) -> None:
    nats.kill()
    try:
        body = {"model": "tiny", "prompt": [900, *range(300, 400)], "max_tokens": 2}
        reply = pulling.post("/v1/completions", body)
        assert reply.status == 200
        assert "x-pigou-prefill-worker" not in reply.headers
        unpulled = "pigou_prefill_queue_unpulled_total"
        assert pulling.metric(unpulled, reason="no_broker") >= 1
    finally:
        nats.start()
