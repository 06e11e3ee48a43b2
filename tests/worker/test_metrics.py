"""The names of a worker's metrics: those of the contract as vLLM has them, its own by the rules."""

from __future__ import annotations

import pytest
from tests.gateway.metric_rules import CONTRACT, complaints, promtool_complaints

from pigou.worker.metrics import WorkerMetrics


def _page() -> str:
    return WorkerMetrics("m", 2048, {"block_size": "16"}, 64).page().decode()


def test_a_workers_own_names_keep_promtools_rules_and_the_contracts_are_the_exceptions() -> None:
    page = _page()
    assert complaints(page) == []
    if (told := promtool_complaints(page)) is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    assert told == []


def test_names_of_the_contract_stay_as_vllm_has_them() -> None:
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc",
                 "prefix_cache_queries_total", "prefix_cache_hits_total"):  # fmt: skip
        assert f"\n{CONTRACT}{name}{{" in _page()
