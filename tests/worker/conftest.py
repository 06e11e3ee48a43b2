"""Worker processes for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tiered_worker import PROMPTS, TieredWorker
from worker_process import Worker, start, stop


@pytest.fixture(scope="session")
def worker(model_folder: Path) -> Iterator[Worker]:
    """Return a worker that every test of the session shares; quick steps, 512 blocks."""
    worker = start(model_folder, "--sleep-base", "1000000", "--sleep-per-seq", "10000",
                   "--blocks", "512", "--max-waiting", "64", "--max-seqs", "32")  # fmt: skip
    yield worker
    stop(worker)


@pytest.fixture
def start_worker(model_folder: Path) -> Iterator[Callable[..., Worker]]:
    """Return a function that starts a worker with options, ended with the test."""
    started: list[Worker] = []

    def begin(*options: str) -> Worker:
        started.append(start(model_folder, *options))
        return started[-1]

    yield begin
    for worker in started:
        stop(worker)


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return what a worker without tiers says."""
    plain = TieredWorker(tmp_path_factory.mktemp("plain") / "log")
    said = plain.texts(PROMPTS)
    plain.kill()
    return said


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., TieredWorker]]:
    """Return a function that starts a worker with tiers, ended with the test."""
    started: list[TieredWorker] = []

    def make(*options: str) -> TieredWorker:
        started.append(TieredWorker(tmp_path / "log", *options))
        return started[-1]

    yield make
    for worker in started:
        worker.kill()
