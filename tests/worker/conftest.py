"""Worker processes for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
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
