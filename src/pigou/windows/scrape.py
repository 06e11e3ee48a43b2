"""Windows from two scrapes of a live fleet: metric pages and the gateway's tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import msgspec
import numpy as np

from pigou.diagnosis.metric_pages import MetricPage, increase, quantile, summed
from pigou.windows.observations import FleetObservation, TenantObservation, WorkerObservation

#: Routes of work; others are probes and pages.
_WORK = ("/v1/completions", "/v1/chat/completions", "other")
TTFT, ITL = "pigou_time_to_first_token_seconds", "pigou_inter_token_latency_seconds"
_WAIT, _STALLS = "pigou_queue_wait_seconds", "pigou_stream_stalls_total"
_INFLIGHT = "pigou_requests_inflight"
_BEGUN, _MAX_TOKENS = "pigou_prompt_begun_tokens", "pigou_prompt_longest_tokens"
_PROMPT_WAIT, _IDLE = "pigou_prompt_wait_seconds", "pigou_kv_idle_tokens"
_WORKER_ITL = "vllm:inter_token_latency_seconds"
#: Least ratio of a worker's highest to lowest load for its knee to be fitted.
_SPREAD = 2.0


class WorkersRow(msgspec.Struct, frozen=True):
    """Fields read of a worker in the answer of `/workers`."""

    id: str
    role: str | None = None
    restarts: int = 0
    out_of_memory: int = 0
    running: float | None = None  # None where the gateway does not count it
    waiting: float = 0.0
    tokens: int = 0
    kv_usage: float | None = None


class WorkersTable(msgspec.Struct, frozen=True):
    """Fields read of the answer of `/workers`."""

    workers: tuple[WorkersRow, ...] = ()
    waiting_by_tenant: dict[str, float] = {}
    held_tokens_by_tenant: dict[str, float] | None = None
    tenant_weights: dict[str, float] = {}


@dataclass(frozen=True)
class FleetScrape:
    """A fleet's metrics at one moment."""

    at_s: float  # from any zero
    gateway: MetricPage  # empty without a gateway
    workers: Mapping[str, MetricPage]  # by worker id
    table: WorkersTable = field(default_factory=WorkersTable)  # the gateway's `/workers`


def scraped_window(before: FleetScrape, now: FleetScrape, start_s: float) -> FleetObservation:
    """Return the window between two scrapes."""
    a, b, seconds = before.gateway, now.gateway, now.at_s - before.at_s

    def rose(name: str, **labels: str) -> float | None:
        return increase(a.total(name, **labels), b.total(name, **labels))

    answered, inflight = requests_by_status(a, b), _inflight(now) - _inflight(before)
    if _INFLIGHT not in b:
        first, last = (page.total("vllm:request_success_total") for page in _servers(before, now))
        answered["200"] = increase(first, last) or 0.0
    refused = rose("pigou_requests_shed_total") or 0.0
    served = sum(count for status, count in answered.items() if status < "400")
    failed = sum(count for status, count in answered.items() if status >= "500")
    again = [rose("pigou_requests_repeated_total"), rose("pigou_client_retries_total")]
    repeated = max((count for count in again if count is not None), default=None)
    stalls = rose(_STALLS, cause="engine") or 0.0
    stalled_s = rose("pigou_stream_stall_seconds_total", cause="engine") or 0.0
    slow = None
    if _STALLS in b or "pigou_clients_stalled_total" in b:
        slow = round(summed((rose(_STALLS, cause="client"), rose("pigou_clients_stalled_total"))))
    hits = [rose("pigou_cache_hits_total", layer=layer) for layer in ("answer", "semantic")]
    stale = [rose("pigou_cache_stale_hits_total", layer=layer) for layer in ("answer", "semantic")]
    waits_before, short_waits = (page.buckets(_PROMPT_WAIT, length="short") for page in (a, b))
    begun = quantile(a.buckets(_BEGUN), b.buckets(_BEGUN), 1.0)
    lengths = [n for n in (a.maximum(_MAX_TOKENS), b.maximum(_MAX_TOKENS), begun) if n is not None]
    ratings = [rose("pigou_answer_ratings_total", rating=rating) for rating in ("up", "down")]
    return FleetObservation(
        answer_hits=None if hits == [None, None] else round(summed(hits)),
        stale_answer_hits=round(summed(stale)), feedbacks=round(summed(ratings)),
        downvotes=round(ratings[1] or 0),
        start_s=start_s, seconds=seconds,
        arrived=max(0, round(sum(answered.values()) + inflight)), completed=round(served),
        failed=max(0, round(failed - refused)), refused=round(refused),
        repeated=None if repeated is None else round(repeated),
        queued=_mean_gauge(a, b, "pigou_requests_queued"),
        ttft_p50_s=quantile(a.buckets(TTFT), b.buckets(TTFT), 0.5),
        itl_p50_s=quantile(a.buckets(ITL), b.buckets(ITL), 0.5),
        itl_p99_s=quantile(a.buckets(ITL), b.buckets(ITL), 0.99),
        wait_p50_s=quantile(a.buckets(_WAIT), b.buckets(_WAIT), 0.5),
        short_wait_p50_s=quantile(waits_before, short_waits, 0.5),
        short_wait_p95_s=quantile(waits_before, short_waits, 0.95),
        long_wait_max_s=b.maximum("pigou_prompt_longest_wait_seconds"),
        starving_lanes=round(b.total("pigou_lane_starves") or 0.0),
        longest_prompt_tokens=round(max(lengths)) if lengths else None,
        client_stalls=slow, engine_stalls=round(stalls),
        engine_stall_s=stalled_s / stalls if stalls else None,
        workers=_workers(before, now, seconds), tenants=_tenants(before, now, seconds),
    )  # fmt: skip


def requests_by_status(a: MetricPage, b: MetricPage) -> dict[str, float]:
    """Return requests of work between two pages, by HTTP status."""
    answered: dict[str, float] = {}
    for route in _WORK:
        for status in b.by("pigou_requests_total", "status"):
            labels = {"route": route, "status": status}
            rose = increase(a.total("pigou_requests_total", **labels),
                            b.total("pigou_requests_total", **labels))  # fmt: skip
            answered[status] = answered.get(status, 0.0) + (rose or 0.0)
    return answered


def _servers(*scrapes: FleetScrape) -> list[MetricPage]:
    """Return the page of one server without a gateway, in each scrape."""
    return [next(iter(scrape.workers.values()), MetricPage()) for scrape in scrapes]


def _inflight(scrape: FleetScrape) -> float:
    if _INFLIGHT in scrape.gateway:
        return scrape.gateway.total(_INFLIGHT) or 0.0
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    return summed(page.total(name) for page in _servers(scrape) for name in names)


def _mean_gauge(a: MetricPage, b: MetricPage, name: str) -> float:
    values = [value for page in (a, b) if (value := page.total(name)) is not None]
    return float(np.mean(values)) if values else 0.0


def _workers(
    before: FleetScrape, now: FleetScrape, seconds: float
) -> tuple[WorkerObservation, ...]:
    rows = {row.id: row for row in now.table.workers}
    known = {row.id: row for row in before.table.workers}
    seen = []
    for name in dict.fromkeys((*rows, *now.workers)):
        row = rows.get(name, WorkersRow(name))
        old = known.get(name, row)
        life = WorkerObservation(
            worker=name, role=row.role or "both", restarts=max(0, row.restarts - old.restarts),
            out_of_memory=max(0, row.out_of_memory - old.out_of_memory),
        )  # fmt: skip
        page = now.workers.get(name)
        if page is None and row.running is not None:
            life = _from_table(life, old, row)
        elif page is not None:
            life = _worker(life, before.workers.get(name, MetricPage()), page, seconds)
        seen.append(life)
    return tuple(seen)


def _from_table(life: WorkerObservation, before: WorkersRow, now: WorkersRow) -> WorkerObservation:
    """Return the gateway's view of a worker without a page of its own."""
    running = ((before.running or 0) + (now.running or 0)) / 2
    return msgspec.structs.replace(
        life, running=running, waiting=(before.waiting + now.waiting) / 2,
        busy=1.0 - float(np.exp(-running)), kv_usage=now.kv_usage,
        output_tokens=max(0, now.tokens - before.tokens),
    )  # fmt: skip


def _worker(
    life: WorkerObservation, a: MetricPage, b: MetricPage, seconds: float
) -> WorkerObservation:
    def rose(name: str) -> float | None:
        return increase(a.total(name), b.total(name))

    ranks = [
        (info.get("num_gpu_blocks", ""), info.get("block_size", ""))
        for info in b.labels("vllm:cache_config_info")
    ]
    kv_tokens = sum(
        int(blocks) * int(size) for blocks, size in ranks if blocks.isdecimal() and size.isdecimal()
    )
    itl_s = rose(f"{_WORKER_ITL}_sum") or 0.0
    running = max(_mean_gauge(a, b, "vllm:num_requests_running"), itl_s / seconds)
    means = (page.mean("vllm:kv_cache_usage_perc") for page in (b, a))
    usages = [usage for usage in means if usage is not None]
    idle = _mean_gauge(a, b, _IDLE) if _IDLE in b else None
    holders = b.by(_IDLE, "tenant")
    if idle is None and usages and kv_tokens:
        still = running == 0.0 and not b.total("vllm:num_requests_waiting")
        idle = min(usages) * kv_tokens if still else 0.0
    queried = rose("vllm:prefix_cache_queries_total") or 0.0
    hits = rose("vllm:prefix_cache_hits_total") or 0.0
    computed = rose("pigou_prefill_tokens_total") or queried - hits
    restored = rose("pigou_tier_restored_blocks_total")
    loads = rose("pigou_lora_loads_total")
    wasted = b.total("pigou_kv_block_tokens") if "pigou_kv_table_tokens" in b else None
    if wasted is not None:
        wasted = wasted * (b.total("pigou_kv_table_blocks") or 0.0)
        wasted = max(0.0, wasted - (b.total("pigou_kv_table_tokens") or 0.0))
    return msgspec.structs.replace(
        life, running=running, waiting=_mean_gauge(a, b, "vllm:num_requests_waiting"),
        # Arrivals are independent: the share of time with nobody is e^-running.
        busy=1.0 - float(np.exp(-running)), kv_tokens=kv_tokens,
        kv_usage=float(np.mean(usages)) if usages else None, wasted_tokens=wasted,
        idle_tokens=idle, idle_tenant=max(holders, key=holders.__getitem__, default=""),
        preemptions=round(rose("vllm:num_preemptions_total") or 0),
        queried_tokens=round(queried), hit_tokens=round(hits),
        prefill_tokens=round(computed or rose("vllm:prompt_tokens_total") or 0),
        prefill_s=rose("pigou_prefill_seconds_total"),
        output_tokens=round(rose("vllm:generation_tokens_total") or 0),
        restores=round(restored or 0), adapter_loads=None if loads is None else round(loads),
        adapter_load_s=rose("pigou_lora_load_seconds_total") or 0.0,
    )  # fmt: skip


def _tenants(
    before: FleetScrape, now: FleetScrape, seconds: float
) -> tuple[TenantObservation, ...]:
    a, b, tokens = before.gateway, now.gateway, dict[str, float]()
    for name in ("pigou_prompt_tokens_total", "pigou_generation_tokens_total"):
        known = a.by(name, "tenant")
        for tenant, count in b.by(name, "tenant").items():
            tokens[tenant] = tokens.get(tenant, 0.0) + (increase(known.get(tenant), count) or 0.0)
    tables = before.table, now.table
    queues = [table.waiting_by_tenant for table in tables]
    held = [t.held_tokens_by_tenant for t in tables if t.held_tokens_by_tenant is not None]
    names = {*(name for name, count in tokens.items() if count), *chain(*queues)}
    weights = now.table.tenant_weights
    return tuple(
        TenantObservation(
            tenant=name, weight=weights.get(name, 1.0), tokens=tokens.get(name, 0.0),
            kv_token_s=sum(h.get(name, 0.0) for h in held) / 2 * seconds if held[1:] else None,
            waiting=sum(queue.get(name, 0) for queue in queues) / 2,
        )
        for name in sorted(names.union(*held))
    )  # fmt: skip


def with_knees(series: Sequence[FleetObservation]) -> tuple[FleetObservation, ...]:
    """Return windows with each worker's knee n = a / b + 2, where ITL = a + b n can be fitted."""
    knees: dict[str, float | None] = {}
    for name in {worker.worker for window in series for worker in window.workers}:
        points = [(worker.running, worker.running * window.seconds / worker.output_tokens)
                  for window in series for worker in window.workers
                  if worker.worker == name and worker.output_tokens > 0
                  and worker.running > 0.5]  # fmt: skip
        knees[name] = _fitted_knee(points)
    return tuple(
        msgspec.structs.replace(window, workers=tuple(
            msgspec.structs.replace(worker, knee=knees[worker.worker])
            for worker in window.workers
        ))
        for window in series
    )  # fmt: skip


def _fitted_knee(points: Sequence[tuple[float, float]]) -> float | None:
    running = np.array([point[0] for point in points])
    if len(points) < 4 or running.max() < _SPREAD * running.min():
        return None
    slope, base = np.polyfit(running, [point[1] for point in points], 1).tolist()
    return base / slope + 2.0 if slope > 0 and base > 0 else None
