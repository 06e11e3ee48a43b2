"""What a worker's metrics page says of its load and speed: a planner learns from it."""

from __future__ import annotations

import re

from pigou.fleet import metrics_page
from pigou.fleet.metrics_page import OLD_USAGE, RUNNING, USAGE, WAITING
from pigou.gateway.worker_report import WorkerReport

_ITL = b"vllm:inter_token_latency_seconds"
_OLD_ITL = b"vllm:time_per_output_token_seconds"
_PREFILL = b"vllm:request_prefill_time_seconds_sum"
_OWN_PREFILL = b"pigou_prefill_seconds_total"
_OWN_PREFILL_TOKENS = b"pigou_prefill_tokens_total"
_ENERGY = b"pigou_device_energy_joules_total"
_TIER, _TIER_LABEL = b"pigou_tier_cap_bytes", re.compile(rb'\btier="(\w{1,32})"')
_NAMES = (
    _ITL + b"_sum", _ITL + b"_count", _OLD_ITL + b"_sum", _OLD_ITL + b"_count", _PREFILL,
    _OWN_PREFILL, _OWN_PREFILL_TOKENS, _ENERGY, RUNNING, WAITING, USAGE, OLD_USAGE,
)  # fmt: skip
#: Bounds of what is read: requests, lines of a page, tiers.
_MAX_COUNT, _MAX_LINES, _MAX_TIERS = 2**31 - 1, 4096, 64


def read_report(page: bytes, now: int) -> WorkerReport:
    """Return what a metrics page says of a worker; None for what it does not say.

    Args:
        now: nanoseconds.
    """
    sums = metrics_page.totals(page, _NAMES, _MAX_LINES)
    itl = _ITL if _ITL + b"_sum" in sums else _OLD_ITL
    return WorkerReport(
        now,
        _count(sums.get(RUNNING)),
        _count(sums.get(WAITING)),
        sums.get(USAGE, sums.get(OLD_USAGE)),
        sums.get(itl + b"_sum"),
        sums.get(itl + b"_count"),
        sums.get(_OWN_PREFILL, sums.get(_PREFILL)),
        sums.get(_OWN_PREFILL_TOKENS),
        sums.get(_ENERGY),
        _tiers(page),
    )


def _tiers(page: bytes) -> tuple[tuple[str, float], ...]:
    tiers: dict[str, float] = {}
    for _, labels, text in metrics_page.samples(page, (_TIER,), _MAX_TIERS):
        if label := _TIER_LABEL.search(labels):
            name = label[1].decode()
            tiers[name] = tiers.get(name, 0.0) + metrics_page.number(text)
    return tuple(sorted(tiers.items()))


def _count(value: float | None) -> int | None:
    return None if value is None else int(min(value, _MAX_COUNT))
