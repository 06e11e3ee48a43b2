"""Runs a function in several processes that form one group of ranks."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from pigou.runtime.parallel import Group

#: Longest wait for a rank's answer, in seconds.
WAIT_S = 240.0


def run_ranks(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return what `function(group, *arguments)` returns in each rank, by rank.

    Ranks are forked: they have the modules and models of this process. Results are pickled.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="pigou-ranks-") as folder:
        pairs = [context.Pipe(duplex=False) for _ in range(size)]
        processes = [
            context.Process(
                target=_rank,
                args=(rank, size, Path(folder) / "meeting", pair[1], function, arguments),
                daemon=True,
            )
            for rank, pair in enumerate(pairs)
        ]
        for process in processes:
            process.start()
        try:
            return [_result(rank, reading) for rank, (reading, _) in enumerate(pairs)]
        finally:
            for process in processes:
                process.kill()
                process.join()


def _rank(
    rank: int,
    size: int,
    meeting: Path,
    writing: Connection,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    try:
        group = Group(rank, size, torch.device("cpu"), meeting)
        writing.send((function(group, *arguments), ""))
        group.barrier()
    except BaseException:
        writing.send((None, traceback.format_exc()))


def _result(rank: int, reading: Connection) -> Any:
    assert reading.poll(WAIT_S), f"rank {rank} does not answer"
    result, error = reading.recv()
    assert not error, f"rank {rank}: {error}"
    return result
