"""Runs a kernel here, or on several threads where that pays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from pigou.runtime import kernels
from pigou.runtime.thread_pool import team_start

#: Work, in about nanoseconds of one thread, below which handing a part to another does not pay.
WORTH = 20_000.0
#: Parts for each thread: one that comes late then leaves more of them to the others.
_SHARES = 4

_SPREAD: dict[Callable[..., None], Callable[..., None]] = {
    kernels.add_norm: kernels.spread_add_norm,
    kernels.argmax: kernels.spread_argmax,
    kernels.decode: kernels.spread_decode,
    kernels.gate: kernels.spread_gate,
    kernels.place: kernels.spread_place,
    kernels.prefill: kernels.spread_prefill,
}
_worth = WORTH


def spread(
    kernel: Callable[..., None], work: float, rows: kernels.Range, *arguments: object
) -> None:
    """Call a kernel for some rows.

    Args:
        kernel: one of those that can be spread.
        work: what it is about to do, in about nanoseconds of one thread.
        rows: its first argument.
        arguments: the others.
    """
    threads = torch.get_num_threads() if work >= _worth else 1
    count = rows[1] - rows[0]
    start = team_start() if threads > 1 and count > 1 else 0
    if not start:
        kernel(rows, *arguments)
        return
    parts = min(threads * _SHARES, count)
    _SPREAD[kernel](start, threads, parts, rows, *arguments)


@contextmanager
def always_spread() -> Iterator[None]:
    """Use all threads for the smallest work, to compile what does so, or to test it."""
    global _worth  # noqa: PLW0603
    _worth = 0.0
    try:
        yield
    finally:
        _worth = WORTH
