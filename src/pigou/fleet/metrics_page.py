"""A worker's metrics page, in the text format of Prometheus: its samples, within bounds."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

#: Gauges of an engine: requests that run, that wait; share of its KV blocks in use.
RUNNING, WAITING = b"vllm:num_requests_running", b"vllm:num_requests_waiting"
USAGE, OLD_USAGE = b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc"
_SAMPLE = re.compile(rb"([a-z_:]+)(?:\{(.*)\})? (\S+)")
#: Bytes of a page, bytes of a line, and lines that are read: of each engine, a handful.
_MAX_PAGE_BYTES, _MAX_LINE_BYTES, _MAX_LINES = 2**23, 2**14, 1024


def lines(page: bytes, names: tuple[bytes, ...]) -> list[bytes]:
    """Return the lines of a metrics page that begin with one of the names."""
    return [line for line in page[:_MAX_PAGE_BYTES].split(b"\n") if line.startswith(names)]


def samples(
    page: bytes, names: tuple[bytes, ...], max_lines: int = _MAX_LINES
) -> Iterator[tuple[bytes, bytes, bytes]]:
    """Yield name, labels and value of the first samples of these metrics.

    Args:
        max_lines: that are looked at, of those that begin with a name.
    """
    for line in lines(page, names)[:max_lines]:
        match = _SAMPLE.fullmatch(line) if len(line) <= _MAX_LINE_BYTES else None
        if match is not None and match[1] in names:
            yield match[1], match[2] or b"", match[3]


def totals(
    page: bytes, names: tuple[bytes, ...], max_lines: int = _MAX_LINES
) -> dict[bytes, float]:
    """Return each metric over all engines of a page: the sum, of `USAGE` the mean.

    A server has an engine for each data parallel rank. What is no finite number of at least 0
    counts as 0.
    """
    values: dict[bytes, list[float]] = {}
    for name, _, text in samples(page, names, max_lines):
        values.setdefault(name, []).append(number(text))
    return {
        name: sum(of_engines) / (len(of_engines) if name in (USAGE, OLD_USAGE) else 1)
        for name, of_engines in values.items()
    }


def number(text: bytes) -> float:
    """Return a finite number of at least 0; 0 for all else."""
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if math.isfinite(value) and value > 0 else 0.0
