"""Recording and alert rules, and the queries of dashboards: metrics exist, alerts fire in time."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
RULES = sorted((ROOT / "deploy" / "rules").glob("*.yml"))
ALERTS = ROOT / "deploy" / "prometheus-alerts.yml"
DASHBOARDS = sorted((ROOT / "deploy" / "grafana").glob("*.json"))
_NAME = re.compile(r"(?<![\w\"$.])((?:pigou|vllm|gen_ai)[:_][\w:]+|DCGM_\w+)")
_SUFFIX = re.compile(r"_(?:bucket|sum|count)$")
#: Labels of a worker's series.
W = 'job="j",instance="i",worker="w",role="decode",model_name="m"'
P = W.replace('role="decode"', 'role="prefill"')
G = 'job="pigou",instance="g",namespace="n"'
S = G + ',model_name="m",class="default"'
WORK = G + ',model_name="m",route="/v1/completions"'
#: By alert: series that set it off, and others that do not.
CASES: dict[str, tuple[dict[str, str], ...]] = {
    "PigouGatewayDown": (
        {f"up{{{G}}}": "1x20 0x380"},
        {f"up{{{G}}}": "1x356 0x3 1x40", 'up{job="another"}': "0x400"},
    ),
    "PigouNoWorkers": (
        {f"up{{{G}}}": "1x400", f'pigou_worker_up{{{G},worker="p",role="prefill"}}': "1x400",
         f'pigou_worker_up{{{G},worker="d",role="decode"}}': "1x300 0x100",
         'pigou_worker_up{job="pigou",instance="other",role="decode"}': "1x400"},
        {f"up{{{G}}}": "1x400", f'pigou_worker_up{{{G},worker="d",role="decode"}}': "1x400",
         f'pigou_worker_up{{{G},worker="e",role="decode"}}': "1x340 0x60"},
    ),
    "PigouWorkerDown": (
        {f"up{{{G}}}": "1x400", f'pigou_worker_up{{{G},worker="d",role="both"}}': "1x400",
         f'pigou_worker_up{{{G},worker="e",role="decode"}}': "1x250 0x150"},
        {f"up{{{G}}}": "1x400", f'pigou_worker_up{{{G},worker="d",role="both"}}': "1x400",
         f'pigou_worker_up{{{G},worker="e",role="decode"}}': "1x330 0x70"},
    ),
    "PigouWorkerRestarts": (
        {f'pigou_worker_restarts_total{{{G},worker="d"}}': "0x100 0+0.05x300"},
        {f'pigou_worker_restarts_total{{{G},worker="d"}}': "7x300 8x100"},
    ),
    "PigouErrors": (
        {f'pigou_requests_total{{{WORK},status="200"}}': "0+90x400",
         f'pigou_requests_total{{{WORK},status="503"}}': "0+10x400"},
        {f'pigou_requests_total{{{WORK},status="200"}}': "0+97x400",
         f'pigou_requests_total{{{WORK},status="429"}}': "0+90x400",
         f'pigou_requests_total{{{WORK},status="502"}}': "0+3x400",
         f'pigou_requests_total{{{G},route="/health",status="503"}}': "0+1000x400"},
        {f'pigou_requests_total{{{WORK},status="200"}}': "5x400",
         f'pigou_requests_total{{{WORK},status="502"}}': "5x400"},  # long ago
    ),
    "PigouSloBurnsFast": (
        {f"pigou_slo_requests_total{{{S}}}": "0+100x400", f"pigou_slo_target_ratio{{{S}}}":
         "0.95x400", f"pigou_slo_attained_total{{{S}}}": "0+100x100 10000+20x300"},
        {f"pigou_slo_requests_total{{{S}}}": "0+100x400", f"pigou_slo_target_ratio{{{S}}}":
         "0.95x400", f"pigou_slo_attained_total{{{S}}}": "0+100x345 34500+0x55"},  # minutes alone
        {f"pigou_slo_requests_total{{{S}}}": "0+100x400", f"pigou_slo_target_ratio{{{S}}}":
         "0.95x400", f"pigou_slo_attained_total{{{S}}}": "0+0x300 0+100x100"},  # mended
        {f"pigou_slo_requests_total{{{S}}}": "5x400", f"pigou_slo_target_ratio{{{S}}}":
         "0.95x400", f"pigou_slo_attained_total{{{S}}}": "0x400"},  # nobody asks
    ),
    "PigouSloBurns": (
        {f"pigou_slo_requests_total{{{S}}}": "0+100x400", f"pigou_slo_target_ratio{{{S}}}":
         "0.95x400", f"pigou_slo_attained_total{{{S}}}": "0+60x400"},
        {f"pigou_slo_requests_total{{{S}}}": "0+100x400", f"pigou_slo_target_ratio{{{S}}}":
         "0.95x400", f"pigou_slo_attained_total{{{S}}}": "0+90x400"},
    ),
    "PigouMemoryBandwidthOutsideTarget": (
        {f"vllm:estimated_read_bytes_per_gpu_total{{{W}}}": "0+3000x400",
         f"vllm:estimated_write_bytes_per_gpu_total{{{W}}}": "0+15x400",
         f"pigou_gpu_peak_bytes_per_second{{{W}}}": "1000x400",
         f"vllm:num_requests_running{{{W}}}": "64x400"},
        {f"vllm:estimated_read_bytes_per_gpu_total{{{W}}}": "0+12000x400",
         f"vllm:estimated_write_bytes_per_gpu_total{{{W}}}": "0+15x400",
         f"pigou_gpu_peak_bytes_per_second{{{W}}}": "1000x400",
         f"vllm:num_requests_running{{{W}}}": "64x400"},
    ),
    "PigouPrefillComputeBelowTarget": (
        {f"vllm:estimated_flops_per_gpu_total{{{P}}}": "0+1500x400",
         f"pigou_gpu_peak_flops_per_second{{{P}}}": "1000x400",
         f"vllm:num_requests_running{{{P}}}": "1x400"},
        {f"vllm:estimated_flops_per_gpu_total{{{P}}}": "0+9000x400",
         f"pigou_gpu_peak_flops_per_second{{{P}}}": "1000x400",
         f"vllm:num_requests_running{{{P}}}": "1x400"},
    ),
    "PigouPcieAboveTarget": (
        {"DCGM_FI_PROF_PCIE_RX_BYTES": "17000000000x400"},
        {"DCGM_FI_PROF_PCIE_RX_BYTES": "15000000000x400"},
    ),
    "PigouNvlinkAboveTarget": (
        {"DCGM_FI_PROF_NVLINK_TX_BYTES": "340000000000x400"},
        {"DCGM_FI_PROF_NVLINK_TX_BYTES": "330000000000x400"},
    ),
    "PigouFreeBlocksBelowTarget": (
        {f"pigou_kv_blocks_free{{{W}}}": "14x400", f"pigou_kv_blocks{{{W}}}": "100x400"},
        {f"pigou_kv_blocks_free{{{W}}}": "16x400", f"pigou_kv_blocks{{{W}}}": "100x400"},
    ),
    "PigouBlockReferencesBelowTarget": (
        {f"pigou_kv_table_blocks{{{W}}}": "55x400", f"pigou_kv_blocks_free{{{W}}}": "50x400",
         f"pigou_kv_blocks{{{W}}}": "100x400", f"vllm:num_requests_running{{{W}}}": "40x400"},
        {f"pigou_kv_table_blocks{{{W}}}": "65x400", f"pigou_kv_blocks_free{{{W}}}": "50x400",
         f"pigou_kv_blocks{{{W}}}": "100x400", f"vllm:num_requests_running{{{W}}}": "40x400"},
    ),
    "PigouPagingWasteAboveTarget": (
        {f"pigou_kv_table_tokens{{{W}}}": "1500x400", f"pigou_kv_table_blocks{{{W}}}": "100x400",
         f"pigou_kv_block_tokens{{{W}}}": "16x400"},
        {f"pigou_kv_table_tokens{{{W}}}": "1550x400", f"pigou_kv_table_blocks{{{W}}}": "100x400",
         f"pigou_kv_block_tokens{{{W}}}": "16x400"},
    ),
    "PigouPreemptions": (
        {f"vllm:num_preemptions_total{{{W}}}": "0+1x400"},
        {f"vllm:num_preemptions_total{{{W}}}": "7x400"},
    ),
    "PigouTtftAboveTarget": (
        {'pigou_time_to_first_token_seconds_bucket{le="0.1",model_name="m"}': "0+9x400",
         'pigou_time_to_first_token_seconds_bucket{le="0.25",model_name="m"}': "0+10x400",
         'pigou_time_to_first_token_seconds_bucket{le="0.5",model_name="m"}': "0+20x400",
         'pigou_time_to_first_token_seconds_bucket{le="+Inf",model_name="m"}': "0+20x400"},
        {'pigou_time_to_first_token_seconds_bucket{le="0.1",model_name="m"}': "0+20x400",
         'pigou_time_to_first_token_seconds_bucket{le="+Inf",model_name="m"}': "0+20x400"},
    ),
    "PigouItlAboveTarget": (
        {'pigou_inter_token_latency_seconds_bucket{le="0.02",model_name="m"}': "0+95x400",
         'pigou_inter_token_latency_seconds_bucket{le="0.03",model_name="m"}': "0+100x400",
         'pigou_inter_token_latency_seconds_bucket{le="+Inf",model_name="m"}': "0+100x400"},
        {'pigou_inter_token_latency_seconds_bucket{le="0.02",model_name="m"}': "0+100x400",
         'pigou_inter_token_latency_seconds_bucket{le="+Inf",model_name="m"}': "0+100x400"},
    ),
    "PigouQueueWaitAboveTarget": (
        {'pigou_queue_wait_seconds_bucket{le="0.05",model_name="m"}': "0+9x400",
         'pigou_queue_wait_seconds_bucket{le="0.1",model_name="m"}': "0+10x400",
         'pigou_queue_wait_seconds_bucket{le="+Inf",model_name="m"}': "0+10x400"},
        {'pigou_queue_wait_seconds_bucket{le="0.05",model_name="m"}': "0+10x400",
         'pigou_queue_wait_seconds_bucket{le="+Inf",model_name="m"}': "0+10x400"},
    ),
    "PigouConcurrencyOutsideTarget": (
        {f"vllm:num_requests_running{{{W}}}": "129x400"},
        {f"vllm:num_requests_running{{{W}}}": "64x400"},
    ),
    "PigouPrefixHitsBelowTarget": (
        {f"vllm:prefix_cache_hits_total{{{W}}}": "0+3x400",
         f"vllm:prefix_cache_queries_total{{{W}}}": "0+10x400"},
        {f"vllm:prefix_cache_hits_total{{{W}}}": "0+5x400",
         f"vllm:prefix_cache_queries_total{{{W}}}": "0+10x400"},
    ),
    "PigouEvictionsAboveTarget": (
        {'pigou_game_evicted_blocks_total{model_name="m"}': "0+20x400"},
        {'pigou_game_evicted_blocks_total{model_name="m"}': "0+10x400"},
    ),
    "PigouClientRetriesAboveTarget": (
        {'pigou_client_retries_total{model_name="m"}': "0+2x400",
         'gen_ai_server_request_duration_seconds_count{model_name="m"}': "0+100x400"},
        {'pigou_client_retries_total{model_name="m"}': "0+0.5x400",
         'gen_ai_server_request_duration_seconds_count{model_name="m"}': "0+100x400"},
    ),
}  # fmt: skip


def rules(*paths: Path) -> list[dict[str, Any]]:
    return [
        rule
        for path in paths or RULES
        for group in yaml.safe_load(path.read_text())["groups"]
        for rule in group["rules"]
    ]


def queries() -> list[str]:
    panels = [panel for path in DASHBOARDS for panel in json.loads(path.read_text())["panels"]]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


def test_every_metric_of_a_rule_or_a_dashboard_exists() -> None:
    docs = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    known = set(re.findall(r"`((?:pigou_|vllm:|gen_ai_)\w+)`", docs))
    known |= {rule["record"] for rule in rules() if "record" in rule}
    for expr in [rule["expr"] for rule in rules(*RULES, ALERTS)] + queries():
        names = _NAME.findall(expr)
        assert names or expr.startswith("up{"), expr
        for name in names:
            histogram = _SUFFIX.sub("", name)
            assert name in known or histogram in known or name.startswith("DCGM_"), (name, expr)


def test_every_recorded_ratio_that_the_reference_names_is_recorded() -> None:
    docs = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    named = set(re.findall(r"`(pigou:\w+)`", docs)) - {"pigou:"}
    assert named <= {rule["record"] for rule in rules() if "record" in rule}


def test_each_alert_fires_outside_its_target_alone(tmp_path: Path) -> None:
    assert {rule["alert"] for rule in rules() if "alert" in rule} == set(CASES)
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    tests, wanted = [], set()
    for alert, sides in CASES.items():
        for fires, series in [(True, sides[0]), *((False, series) for series in sides[1:])]:
            check = {"eval_time": "90m", "alertname": alert}
            tests.append({
                "name": f"{alert}:{fires}", "interval": "15s", "alert_rule_test": [check],
                "input_series": [{"series": k, "values": v} for k, v in series.items()],
            })  # fmt: skip
            wanted |= {alert} if fires else set()
    path = tmp_path / "tests.yml"
    path.write_text(yaml.safe_dump({"rule_files": list(map(str, RULES)), "tests": tests}))
    done = subprocess.run(
        [program, "test", "rules", str(path)], capture_output=True, text=True, check=False
    )
    # What fires is told as unexpected: once for each alert, in the tests outside the targets.
    fired = re.findall(r"alertname: (\w+), time:", done.stdout + done.stderr)
    assert sorted(fired) == sorted(wanted), done.stdout + done.stderr
