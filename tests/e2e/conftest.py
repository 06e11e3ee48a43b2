"""Fleets that the tests of this folder share, and that end with the last of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.fleet import Fleet, worker

from pigou.models import bundled_path
from tools.make_random_checkpoint import Shape, write_checkpoint

#: Bytes of a block of the model below: K and V, 2 layers, 16 slots, 2 heads of 16, fp32.
BLOCK_BYTES = 2 * 2 * 16 * 2 * 16 * 4
SHAPE = Shape(
    hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffn=128, vocab=1024, max_len=2048
)
_QUICK = ("--kv-lease", "3", "--rehearse", "0")
REAL = ("--dtype", "fp32", "--blocks", "1536", "--threads", "1", *_QUICK)
SLEEP = ("--executor", "sleep", "--blocks", "1024", "--repeat", "1", *_QUICK)


@pytest.fixture(scope="package")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A seeded random Llama of two layers with a byte-level tokenizer, in fp32."""
    folder = tmp_path_factory.mktemp("e2e") / "tiny"
    write_checkpoint(folder, SHAPE, dtype="float32")
    return folder


@pytest.fixture(scope="package")
def real(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One prefill worker; one decode worker that pulls by shared memory, plans 8 steps at once;
    one that pulls over TCP, and plans one by one.
    """
    workers = [
        worker("prefill-0", checkpoint, *REAL),
        worker("decode-shm", checkpoint, *REAL, "--kv-transfer", "shm", "--repeat", "8"),
        worker("decode-tcp", checkpoint, *REAL, "--kv-transfer", "tcp", "--repeat", "1"),
    ]
    fleet = Fleet.start(tmp_path_factory.mktemp("real") / "log", workers)
    yield fleet
    fleet.stop()


@pytest.fixture(scope="package")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One worker for both, of the bundled model."""
    options = ("--blocks", "1024", "--threads", "1", *_QUICK)
    log = tmp_path_factory.mktemp("bundled") / "log"
    fleet = Fleet.start(log, [worker("both-0", bundled_path(), *options)])
    yield fleet
    fleet.stop()


@pytest.fixture(scope="package")
def sleeping(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One prefill and two decode workers without a model; 20 ms a step."""
    slow = (*SLEEP, "--sleep-base", "20000000")
    workers = [
        worker("prefill-0", checkpoint, *slow, "--sleep-prefill-rate", "2000"),
        worker("decode-0", checkpoint, *slow),
        worker("decode-1", checkpoint, *slow),
    ]
    fleet = Fleet.start(tmp_path_factory.mktemp("sleeping") / "log", workers)
    yield fleet
    fleet.stop(files=False)  # tests kill its workers


@pytest.fixture
def start_fleet(checkpoint: Path, tmp_path: Path) -> Iterator[Callable[..., Fleet]]:
    """Return a function that starts a fleet of workers of these names; ended with the test."""
    started: list[Fleet] = []

    def begin(names: list[str], *options: str, **settings: Any) -> Fleet:
        workers = [worker(name, checkpoint, *options) for name in names]
        started.append(Fleet.start(tmp_path / f"log-{len(started)}", workers, **settings))
        return started[-1]

    yield begin
    for fleet in started:
        fleet.abandon()
