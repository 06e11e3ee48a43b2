"""A prompt that one worker has cached is read by the other, and nothing is lost where it fails."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.conftest import REAL
from tests.e2e.fleet import Fleet, worker

from pigou.wire.prefill_decode_legs import leg_two
from tools.make_random_checkpoint import Shape, write_checkpoint

NAMES = ["both-0", "both-1"]
#: Turns about, so that the second asked for a prompt is not the one that has it.
TURNS = {"policy": "round-robin"}

MEASURED = (*REAL, "--rehearse", "0.5")
#: Prefill of a prompt below takes about 200 ms, so that reading pays on any machine: 5 ms before
#: the first measured read.
SHAPE = Shape(
    hidden=256, layers=4, heads=4, kv_heads=2, head_dim=16, ffn=1024, vocab=1024, max_len=2048
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose prompts cost far more to compute than to read."""
    folder = tmp_path_factory.mktemp("peers") / "tiny"
    write_checkpoint(folder, SHAPE, dtype="float32")
    return folder


COUNTS = ("pigou_peer_reads_total", "pigou_peer_read_tokens_total")


def body(seed: int, tokens: int = 1500) -> dict[str, Any]:
    generator = random.Random(seed)
    prompt = [generator.randrange(6, 1024) for _ in range(tokens)]
    return {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True}  # fmt: skip


def tokens(reply: Any) -> list[int]:
    found: list[int] = reply["choices"][0]["token_ids"]
    return found


def decision(fleet: Fleet) -> dict[str, Any]:
    found: dict[str, Any] = fleet.get("/decisions?limit=1").json["decisions"][0]
    return found


def known(fleet: Fleet, worker: str) -> None:
    """Wait until the gateway has heard of all that a worker has cached."""
    cached = fleet.worker(worker).metric("pigou_kv_blocks_cached")
    assert cached > 0
    fleet.wait(lambda rows: rows[worker]["cached_blocks"] == cached)


@pytest.fixture(scope="module")
def pair(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    workers = [worker(name, checkpoint, *MEASURED) for name in NAMES]
    fleet = Fleet.start(tmp_path_factory.mktemp("pair") / "log", workers, control=TURNS)
    yield fleet
    fleet.stop(files=False)


def test_what_one_worker_has_cached_the_other_reads(pair: Fleet) -> None:
    read = []
    reads, read_tokens = (pair.metric(name) for name in COUNTS)
    for seed in range(2):
        first = pair.complete(**body(seed))
        had = decision(pair)["decode"]
        assert decision(pair)["read"] is None
        known(pair, had)
        other = pair.worker(next(name for name in NAMES if name != had))
        before = other.metric("vllm:external_prefix_cache_hits_total")
        second = pair.complete(**body(seed))
        why = decision(pair)
        assert why["decode"] != had
        assert why["read"]["worker"] == had
        assert why["read"]["tokens"] == why["read"]["depth_tokens"] == 1488
        assert why["read"]["saves_seconds"] > 0
        assert tokens(second) == tokens(first)
        # A read that fails, as by its time limit on a busy machine, is computed instead.
        read.append(second["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert read[-1] in (0, 1488)
        assert other.metric("vllm:external_prefix_cache_hits_total") - before == read[-1]
    assert 1488 in read
    assert [pair.metric(name) for name in COUNTS] == [reads + 2, read_tokens + 2 * 1488]
    assert pair.metric("pigou_game_peer_read_saved_seconds_total") > 0
    pair.settle()


def test_a_source_that_does_not_answer_or_dies_costs_only_the_computing(pair: Fleet) -> None:
    first = pair.complete(**body(7))
    had = decision(pair)["decode"]
    other = pair.worker(next(name for name in NAMES if name != had))
    known(pair, had)
    ticket = pair.worker(had).post("/v1/kv/offer", body(7)).json["kv_transfer_params"]
    assert ticket is not None
    late = pair.metric("pigou_peer_reads_total", outcome="late")
    pair.signal(had, signal.SIGSTOP)
    pid = pair.pid(had)
    try:
        second = pair.complete(**body(7))
        assert decision(pair)["read"]["worker"] == had
        assert pair.metric("pigou_peer_reads_total", outcome="late") == late + 1
        assert tokens(second) == tokens(first)
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    finally:
        pair.signal(had, signal.SIGKILL)
    # A worker that was promised blocks finds nobody there.
    promised = other.post("/v1/completions", leg_two(body(7) | {"cache_salt": "new"}, ticket)).json
    salted = other.complete(**body(7), cache_salt="again")
    assert tokens(promised) == tokens(salted)
    pair.recovered([pid])
    pair.settle()


def test_nothing_is_lost_when_the_source_is_killed_amid_the_reading(pair: Fleet) -> None:
    source = pair.worker("both-0")
    bodies = [body(seed, 1900) for seed in range(20, 28)]
    reads = pair.metric("pigou_peer_reads_total")
    expected = [tokens(source.complete(**each)) for each in bodies]
    known(pair, "both-0")
    with ThreadPoolExecutor(len(bodies)) as pool:
        replies = [pool.submit(pair.stream, **each, stream=True) for each in bodies]
        end = time.monotonic() + 60
        while pair.metric("pigou_peer_reads_total") == reads and time.monotonic() < end:
            time.sleep(0.005)
        pid = pair.signal("both-0")
        told = [reply.result(200) for reply in replies]
    assert pair.metric("pigou_peer_reads_total") > reads
    for reply, tokens_ in zip(told, expected, strict=True):
        assert reply.done
        assert reply.error is None
        assert reply.tokens == tokens_
    pair.recovered([pid])
    pair.settle()


def test_nobody_reads_where_it_is_switched_off(start_fleet: Callable[..., Fleet]) -> None:
    fleet = start_fleet(NAMES, *MEASURED, control=TURNS | {"peer_reads": False})
    fleet.complete(**body(1))
    known(fleet, decision(fleet)["decode"])
    fleet.complete(**body(1))
    assert decision(fleet)["read"] is None
    assert fleet.metric("pigou_peer_reads_total") == 0
