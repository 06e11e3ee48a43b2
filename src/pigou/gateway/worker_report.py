"""What a worker says of its load and speed."""

from __future__ import annotations

from typing import NamedTuple


class WorkerReport(NamedTuple):
    """What a worker said of itself; None for what it does not say.

    Attributes:
        at_ns: when.
        running, waiting: its requests.
        kv_usage: share of its KV blocks in use, 0 to 1.
        itl_s, itl_count: sum and number of the seconds between tokens, since its start.
        prefill_s: seconds in which it computed prompts, since its start.
        prefill_tokens: that it computed in them, those of prompts that were given up counted.
        joules: that its device used, by a counter.
        tiers: bytes that each of its tiers may hold, by name.
    """

    at_ns: int
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    itl_s: float | None = None
    itl_count: float | None = None
    prefill_s: float | None = None
    prefill_tokens: float | None = None
    joules: float | None = None
    tiers: tuple[tuple[str, float], ...] = ()
