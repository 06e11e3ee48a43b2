"""Stages of a worker's start, told to whoever started it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from pigou.kernel_cache import told_of_compiling

_log = logging.getLogger("pigou.worker")

#: Environment variable: with 1, each stage is also a line of JSON on stdout, as a fleet reads it.
STAGES = "PIGOU_STAGES"


def report_stage(stage: str) -> None:
    """Tell that a stage began."""
    _log.info("%s", stage)
    if os.environ.get(STAGES) == "1":
        print(msgspec.json.encode({"stage": stage}).decode(), flush=True)


@contextmanager
def compiling_reported(what: str) -> Iterator[None]:
    """Tell that a stage began; within it, tell of the kernels that are compiled."""
    report_stage(what)
    compiled = 0

    def listener(_: str) -> None:
        nonlocal compiled
        compiled += 1
        report_stage(f"{what}, compiling kernel {compiled} (first start only)")

    with told_of_compiling(listener):
        yield
