"""What a worker says of its load and speed."""

from __future__ import annotations

from typing import NamedTuple


class WorkerReport(NamedTuple):
    """What a worker said of itself; None for what it does not say.

    Attributes:
        itl_s, itl_count: sum and number of the seconds between tokens, since its start.
    """

    at_ns: int
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None  # share of its KV blocks in use, 0 to 1
    itl_s: float | None = None
    itl_count: float | None = None
    prefill_s: float | None = None  # seconds in which it computed prompts, since its start
    # that it computed in them, those of prompts that were given up counted.
    prefill_tokens: float | None = None
    joules: float | None = None
    tiers: tuple[tuple[str, float], ...] = ()  # bytes that each of its tiers may hold, by name
