"""What a worker's metrics page says of its load and speed: a planner learns from it."""

from __future__ import annotations

import math
import re

from pigou.gateway.worker_report import WorkerReport

_ITL = b"vllm:inter_token_latency_seconds"
_OLD_ITL = b"vllm:time_per_output_token_seconds"
_PREFILL = b"vllm:request_prefill_time_seconds_sum"
_OWN_PREFILL = b"pigou_prefill_seconds_total"
_RUNNING, _WAITING = b"vllm:num_requests_running", b"vllm:num_requests_waiting"
_USAGE, _OLD_USAGE = b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc"
_NAMES = (
    _ITL, _OLD_ITL, _PREFILL, _OWN_PREFILL, _RUNNING, _WAITING, _USAGE, _OLD_USAGE
)  # fmt: skip
_SAMPLE = re.compile(rb"([a-z_:]+)(?:\{.*\})? (\S+)")
#: Bounds of what is read of a page: bytes, bytes of a line, lines.
_MAX_COUNT = 2**31 - 1
_MAX_PAGE_BYTES, _MAX_LINE_BYTES, _MAX_LINES = 2**23, 2**14, 4096


def read_report(page: bytes, now: int) -> WorkerReport:
    """Return what a metrics page says of a worker; None for what it does not say.

    Args:
        page: of its metrics.
        now: nanoseconds.
    """
    sums: dict[bytes, float] = {}
    lines = [line for line in page[:_MAX_PAGE_BYTES].split(b"\n") if line.startswith(_NAMES)]
    for line in lines[:_MAX_LINES]:
        match = _SAMPLE.fullmatch(line) if len(line) <= _MAX_LINE_BYTES else None
        if match is not None:
            sums[match[1]] = sums.get(match[1], 0.0) + _number(match[2])
    itl = _ITL if _ITL + b"_sum" in sums else _OLD_ITL
    return WorkerReport(
        now,
        _count(sums.get(_RUNNING)),
        _count(sums.get(_WAITING)),
        sums.get(_USAGE, sums.get(_OLD_USAGE)),
        sums.get(itl + b"_sum"),
        sums.get(itl + b"_count"),
        sums.get(_OWN_PREFILL, sums.get(_PREFILL)),
    )


def _count(value: float | None) -> int | None:
    return None if value is None else int(min(value, _MAX_COUNT))


def _number(text: bytes) -> float:
    """Return a finite number of at least 0; 0 for all else."""
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if math.isfinite(value) and value > 0 else 0.0
