"""Runs a kernel here, or on several threads where that pays."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numba
import torch

from pigou.runtime import kernels

#: Work, in about nanoseconds of one thread, below which waking another does not pay.
WORTH = 150_000.0

_SPREAD: dict[Callable[..., None], Callable[..., None]] = {
    kernels.add_norm: kernels.spread_add_norm,
    kernels.gate: kernels.spread_gate,
    kernels.decode: kernels.spread_decode,
    kernels.place: kernels.spread_place,
}
_settings: Any = numba.config
#: These threads sleep while there is nothing to do, but serve one caller at a time.
_settings.THREADING_LAYER = "workqueue"
_one_caller = threading.Lock()
_worth = WORTH


def spread(kernel: Callable[..., None], work: float, rows: kernels.Range, *arguments: Any) -> None:
    """Call a kernel for some rows.

    Args:
        kernel: one of those that can be spread.
        work: what it is about to do, in about nanoseconds of one thread.
        rows: its first argument.
        arguments: the others.
    """
    parts = 1 if work < _worth else min(torch.get_num_threads(), _settings.NUMBA_NUM_THREADS)
    if parts == 1:
        kernel(rows, *arguments)
        return
    with _one_caller:
        numba.set_num_threads(parts)
        _SPREAD[kernel](parts, rows, *arguments)


@contextmanager
def always_spread() -> Iterator[None]:
    """Use all threads for the smallest work, to compile what does so, or to test it."""
    global _worth  # noqa: PLW0603
    _worth = 0.0
    try:
        yield
    finally:
        _worth = WORTH
