"""The names of a worker's metrics: those of the contract as vLLM has them, its own by the rules."""

from __future__ import annotations

import re
import time
from itertools import pairwise
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.gateway.metric_rules import CONTRACT, complaints, promtool_complaints

from pigou.config import EngineConfig
from pigou.diagnosis.diagnose import diagnose
from pigou.diagnosis.metric_pages import MetricPage
from pigou.diagnosis.mode import ModeFinding
from pigou.engine.core import EngineCore
from pigou.engine.plan import Result
from pigou.models.read import architecture
from pigou.request import SECOND, Request
from pigou.windows.scrape import FleetScrape, scraped_window
from pigou.worker.device_use import estimate_of
from pigou.worker.metrics import (
    _DRAFT_ROWS,
    _EXPERT_ROWS,
    _POSITION_ROWS,
    TIER_ROWS,
    TIER_TENANT_ROWS,
    WorkerMetrics,
)


def _page() -> str:
    work = estimate_of(architecture("llama-3.1-8b"), "h100")
    return WorkerMetrics("m", 2048, {"block_size": "16"}, 64, work).page().decode()


def test_a_workers_own_names_keep_promtools_rules_and_the_contracts_are_the_exceptions() -> None:
    page = _page()
    assert complaints(page) == []
    if (told := promtool_complaints(page)) is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    assert told == []


def test_names_of_the_contract_stay_as_vllm_has_them() -> None:
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc",
                 "prefix_cache_queries_total", "prefix_cache_hits_total",
                 "estimated_flops_per_gpu_total", "estimated_read_bytes_per_gpu_total",
                 "estimated_write_bytes_per_gpu_total"):  # fmt: skip
        assert f"\n{CONTRACT}{name}{{" in _page()


def test_kv_that_a_tenant_holds_unused_is_shown_and_diagnosed_until_it_is_released() -> None:
    core = EngineCore(EngineConfig(blocks=64), epoch=time.time_ns() - 60 * SECOND)
    core.add(Request("held", prompt=400, max_tokens=1, tenant="anna", hold=True))
    while core.running or core.waiting:
        core.apply(plan := core.schedule(0), Result(steps=plan.repeat))
    metrics = WorkerMetrics("m", 2048, {"block_size": "16", "num_gpu_blocks": "64"}, 64)

    def found() -> list[ModeFinding]:
        metrics.gauges.read_load(core, 1)
        page = MetricPage.read(metrics.page().decode())
        scrapes = [FleetScrape(10.0 * n, MetricPage(), {"w": page}) for n in range(6)]
        return list(diagnose([scraped_window(a, b, a.at_s) for a, b in pairwise(scrapes)]).findings)

    (finding,) = found()
    assert (finding.number, finding.evidence[0].value) == (14, 25 / 64)
    assert finding.evidence[-1].where == "anna"
    core.release("held")
    assert found() == []


def test_every_metric_of_a_worker_is_documented() -> None:
    docs = (Path(__file__).parents[2] / "docs" / "reference" / "metrics.md").read_text()
    _, heading, worker = docs.partition("## A worker's own")
    assert heading
    named = set(re.findall(r"`((?:pigou_|vllm:)\w+)`", worker.partition("## Nine cache")[0]))
    families = text_string_to_metric_families(_page())
    exported = {each.name + "_total" * (each.type == "counter") for each in families}
    optional = (*TIER_ROWS, *TIER_TENANT_ROWS, *_EXPERT_ROWS, *_DRAFT_ROWS, *_POSITION_ROWS)
    counters = {"pigou_device_energy_joules_total"}  # where the device has one
    counters |= {
        "pigou_lora_loads_total",
        "pigou_lora_load_seconds_total",
        "vllm:lora_requests_info",
        "vllm:lora_adapter_loaded",
    }  # with adapters
    others = {row.name + "_total" * row.counter for row in optional}
    assert exported | others | counters == named
