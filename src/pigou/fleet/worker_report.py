"""Load, progress and speed of a worker, read from its metrics page."""

from __future__ import annotations

import re

from msgspec import UNSET

from pigou.control.messages import AdapterReport, LoadReport
from pigou.fleet.hang_detection import EngineProgress
from pigou.gateway.proxy.upstream import WorkerReport
from pigou.wire import metrics_text
from pigou.wire.metrics_text import OLD_USAGE, RUNNING, USAGE, WAITING

_PREEMPTIONS = b"vllm:num_preemptions_total"
_LOADS = (RUNNING, WAITING, USAGE, OLD_USAGE)
_ITL = b"vllm:inter_token_latency_seconds"
_OLD_ITL = b"vllm:time_per_output_token_seconds"
_PREFILL = b"vllm:request_prefill_time_seconds_sum"
_OWN_PREFILL = b"pigou_prefill_seconds_total"
_OWN_PREFILL_TOKENS = b"pigou_prefill_tokens_total"
_ENERGY = b"pigou_device_energy_joules_total"
_IMBALANCE = b"pigou_expert_rank_imbalance"
_TIER, _TIER_NAME = b"pigou_tier_cap_bytes", re.compile(r"\w{1,32}", re.ASCII)
_NAMES = (
    _ITL + b"_sum", _ITL + b"_count", _OLD_ITL + b"_sum", _OLD_ITL + b"_count", _PREFILL,
    _OWN_PREFILL, _OWN_PREFILL_TOKENS, _ENERGY, _IMBALANCE, *_LOADS,
)  # fmt: skip
_ADAPTERS = b"vllm:lora_requests_info", b"vllm:lora_adapter_loaded"
_LOADED = b"pigou_lora_loads_total", b"pigou_lora_load_seconds_total"
_MAX_ADAPTERS, _MAX_NAME = 2**12, 256
#: Bounds: requests of a load and of a report, lines of a page, tiers.
_MAX_LOAD, _MAX_COUNT, _MAX_LINES, _MAX_TIERS = 2**20, 2**31 - 1, 4096, 64


def read_load(page: bytes, worker: str) -> LoadReport:
    """Return a worker's load by its metrics page; missing ones are 0, preemptions unset."""
    sums = metrics_text.totals(page, (*_LOADS, _PREEMPTIONS))
    preemptions = sums.get(_PREEMPTIONS)
    return LoadReport(
        worker,
        int(min(sums.get(RUNNING, 0.0), _MAX_LOAD)),
        int(min(sums.get(WAITING, 0.0), _MAX_LOAD)),
        min(sums.get(USAGE, sums.get(OLD_USAGE, 0.0)), 1.0),
        UNSET if preemptions is None else int(min(max(preemptions, 0.0), _MAX_COUNT)),
    )


def read_adapters(page: bytes, worker: str) -> AdapterReport | None:
    """Return a worker's LoRA adapters by its metrics page; None if it does not tell them."""
    slots, loaded, sums = 0, [], metrics_text.totals(page, _LOADED)
    for name, text, value in metrics_text.samples(page, _ADAPTERS, _MAX_ADAPTERS):
        labels = metrics_text.labels(text)
        if name == _ADAPTERS[0] and labels.get("max_lora", "").isdecimal():
            slots = int(labels["max_lora"][:4])
        elif labels.get("level") == "gpu" and metrics_text.number(value):
            loaded.append(labels.get("adapter_name", "")[:_MAX_NAME])
    if not slots or _ADAPTERS[1] not in page:
        return None
    mean_s = sums.get(_LOADED[1], 0.0) / max(sums.get(_LOADED[0], 0.0), 1.0)
    return AdapterReport(worker, slots, tuple(loaded), min(mean_s, 3600.0))


def metrics_progress(
    page: bytes, *, owed: int, planned_tokens: int, unstreamed: int = 0, bytes_read: int = 0
) -> EngineProgress | None:
    """Return the progress of an engine that reports by metrics alone, such as a stock vLLM.

    `owed` requests await bytes, `unstreamed` ones a whole reply (some servers count those at their
    end alone); `planned_tokens` are of prompts sent and not yet answered. None without a request
    count.
    """
    running = metrics_text.totals(page, (RUNNING,)).get(RUNNING)
    if running is None:
        return None
    busy = owed > 0 or (running > 0 and not unstreamed)
    mark = bytes_read, hash(tuple(metrics_text.lines(page, (b"vllm:",))))
    return EngineProgress(busy, mark, planned_tokens)


def read_report(page: bytes, now: int) -> WorkerReport:
    """Return a worker's report at `now` (ns); missing figures are None."""
    sums = metrics_text.totals(page, _NAMES, _MAX_LINES)
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
        sums.get(_IMBALANCE),
    )


def _tiers(page: bytes) -> tuple[tuple[str, float], ...]:
    tiers: dict[str, float] = {}
    for _, text, value in metrics_text.samples(page, (_TIER,), _MAX_TIERS):
        name = metrics_text.labels(text).get("tier", "")
        if _TIER_NAME.fullmatch(name):
            tiers[name] = tiers.get(name, 0.0) + metrics_text.number(value)
    return tuple(sorted(tiers.items()))


def _count(value: float | None) -> int | None:
    return None if value is None else int(min(value, _MAX_COUNT))
