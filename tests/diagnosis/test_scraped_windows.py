"""Laws of scraped windows: differences of counters, means of gauges, and None for the unknown."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from pigou.diagnosis.metric_pages import MetricPage, increase, quantile
from pigou.windows.observations import FleetObservation, WorkerObservation
from pigou.windows.scrape import FleetScrape, WorkersTable, scraped_window, with_knees

GATEWAY = """# HELP x
pigou_requests_total{{route="/v1/completions",status="200"}} {ok}
pigou_requests_total{{route="/v1/completions",status="502"}} {bad}
pigou_requests_total{{route="/metrics",status="200"}} 999
pigou_requests_inflight 3
pigou_requests_queued {queued}
pigou_requests_shed_total 0
pigou_generation_tokens_total{{tenant="an\\"na"}} {tokens}
pigou_inter_token_latency_seconds_bucket{{le="0.01"}} {tokens}
pigou_inter_token_latency_seconds_bucket{{le="+Inf"}} {tokens}
nonsense {{ 1 2 3
"""
WORKER = """vllm:num_requests_running{{engine="0"}} 2
vllm:kv_cache_usage_perc 0.5
vllm:num_preemptions_total {preemptions}
vllm:cache_config_info{{block_size="16",num_gpu_blocks="100"}} 1
"""


def scrape(at_s: float, *, ok: int, bad: int, preemptions: int, restarts: int = 0) -> FleetScrape:
    page = GATEWAY.format(ok=ok, bad=bad, queued=ok / 10, tokens=ok * 5)
    table = {"workers": [{"id": "d", "role": "decode", "restarts": restarts,
                          "out_of_memory": restarts // 2}],
             "waiting_by_tenant": {"bert": 2}}  # fmt: skip
    pages = {"d": MetricPage.read(WORKER.format(preemptions=preemptions))}
    return FleetScrape(at_s, MetricPage.read(page), pages, msgspec.convert(table, WorkersTable))


def test_a_window_is_what_happened_between_two_scrapes() -> None:
    before, now = scrape(0.0, ok=10, bad=0, preemptions=5), scrape(
        5.0, ok=30, bad=2, preemptions=8, restarts=2
    )  # fmt: skip
    window = scraped_window(before, now, 0.0)
    assert (window.arrived, window.completed, window.failed, window.queued) == (22, 20, 2, 2.0)
    assert window.repeated is None
    assert window.itl_p50_s == pytest.approx(0.005)
    (worker,) = window.workers
    assert (worker.preemptions, worker.restarts, worker.out_of_memory) == (3, 2, 1)
    assert (worker.kv_tokens, worker.kv_usage, worker.wasted_tokens) == (1600, 0.5, None)
    assert [(t.tenant, t.tokens, t.waiting) for t in window.tenants] == [
        ('an\\"na', 100.0, 0.0), ("bert", 0.0, 2.0)]  # fmt: skip


def test_loads_of_adapters_are_counted_where_a_worker_tells_them() -> None:
    def at(second: float, loads: int) -> FleetScrape:
        one = scrape(second, ok=10, bad=0, preemptions=0)
        page = f"pigou_lora_loads_total {loads}\npigou_lora_load_seconds_total {loads * 0.25}\n"
        return replace(one, workers={"d": MetricPage.read(page)}) if loads else one

    (worker,) = scraped_window(at(0.0, 4), at(5.0, 10), 0.0).workers
    assert (worker.adapter_loads, worker.adapter_load_s) == (6, 1.5)
    (worker,) = scraped_window(at(0.0, 0), at(5.0, 0), 0.0).workers
    assert worker.adapter_loads is None


def test_a_counter_that_began_anew_counts_from_zero() -> None:
    assert increase(100.0, 7.0) == 7.0
    assert increase(None, 7.0) == 7.0
    assert increase(5.0, None) is None


def test_a_quantile_is_that_of_the_window_alone() -> None:
    before = {0.1: 1000.0, 1.0: 1000.0, float("inf"): 1000.0}
    now = {0.1: 1000.0, 1.0: 1010.0, float("inf"): 1010.0}
    assert quantile(before, now, 0.5) == pytest.approx(0.55)
    assert quantile(now, now, 0.5) is None


def test_a_knee_is_fitted_where_the_load_varied() -> None:
    def window(at: int, running: float) -> FleetObservation:
        gap_s = 0.008 + 0.0002 * running
        worker = WorkerObservation(
            worker="d", running=running, output_tokens=round(running * 10 / gap_s)
        )
        return FleetObservation(start_s=10.0 * at, seconds=10.0, workers=(worker,))

    varied = [window(at, running) for at, running in enumerate((2, 5, 10, 20))]
    assert with_knees(varied)[0].workers[0].knee == pytest.approx(42.0, rel=0.02)
    assert with_knees(varied[2:])[0].workers[0].knee is None
