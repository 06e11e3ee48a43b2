"""Laws of the alerts and playbooks: one definition, current files, and rules that fire."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from pigou.diagnosis.modes import MODES
from tools.diagnosis_pages import ROOT, alert_name, anchor, pages

ALERTS = ROOT / "deploy" / "prometheus-alerts.yml"
#: What metrics show while a fleet has a fault, by mode: series and values of each minute.
SERIES = {
    1: {'pigou_worker_out_of_memory_total{worker="a"}': "0x12 1x20"},
    2: {'vllm:kv_cache_usage_perc{worker="a"}': "0.97x30",
        'vllm:num_preemptions_total{worker="a"}': "0+60x30"},
    4: {'vllm:prefix_cache_hits_total{worker="a"}': "0+600x75 45000+6x30",
        'vllm:prefix_cache_queries_total{worker="a"}': "0+1000x110"},
    5: {'pigou_cache_stale_hits_total{layer="semantic"}': "0+1x30",
        'pigou_cache_hits_total{layer="semantic"}': "0+10x30"},
    6: {"pigou_requests_queued": "0+60x30"},
    7: {f'pigou_inter_token_latency_seconds_bucket{{le="{le}"}}': f"0+{count}x30"
        for le, count in (("0.01", 60), ("0.1", 90), ("1", 100), ("+Inf", 100))}
    | {'pigou_game_prefill_busy_ratio{worker="d"}': "0.5x30",
       'pigou_worker_up{worker="d",role="decode"}': "1x30"},
    8: {'pigou_prompt_wait_seconds_bucket{length="short",le="0.1"}': "0+100x75 7500x35",
        'pigou_prompt_wait_seconds_bucket{length="short",le="5"}': "0+100x75 7500+100x35",
        'pigou_prompt_wait_seconds_bucket{length="short",le="+Inf"}': "0+100x75 7500+100x35",
        'pigou_prompt_begun_tokens_bucket{le="128"}': "0+100x110",
        'pigou_prompt_begun_tokens_bucket{le="65536"}': "0+100x75 7500+101x35",
        'pigou_prompt_begun_tokens_bucket{le="+Inf"}': "0+100x75 7500+101x35"},
    9: {'pigou_prompt_wait_seconds_bucket{length="short",le="0.1"}': "0+100x30",
        'pigou_prompt_wait_seconds_bucket{length="short",le="+Inf"}': "0+100x30",
        'pigou_queue_wait_seconds_bucket{le="0.1"}': "0+100x30",
        'pigou_queue_wait_seconds_bucket{le="+Inf"}': "0+100x30",
        "pigou_prompt_longest_wait_seconds": "0+20x30"},
    10: {"pigou_requests_queued": "5x30", 'pigou_worker_kv_usage_ratio{worker="a"}': "0.2x30",
         'pigou_game_expected_itl_seconds{worker="a"}': "0.01x30"},
    11: {'pigou_generation_tokens_total{tenant="a"}': "0+900x30",
         'pigou_generation_tokens_total{tenant="b"}': "0+10x30",
         'pigou_generation_tokens_total{tenant="c"}': "0+10x30", "pigou_requests_queued": "5x30"},
    12: {"pigou_requests_repeated_total": "0+60x30",
         'pigou_requests_total{route="/v1/completions",status="200"}': "0+600x30",
         'pigou_requests_total{route="/health",status="200"}': "0+60000x30",
         "pigou_requests_queued": "5x30"},
    13: {'pigou_stream_stalls_total{cause="client"}': "0+1x30",
         'pigou_stream_stalls_total{cause="engine"}': "0x30"},
    14: {'pigou_kv_idle_tokens{worker="a",tenant="x"}': "4000x30",
         'pigou_kv_blocks{worker="a"}': "1000x30", 'pigou_kv_block_tokens{worker="a"}': "16x30"},
    15: {'pigou_lora_loads_total{worker="a"}': "0+60x30",
         'pigou_lora_load_seconds_total{worker="a"}': "0+24x30"}
    | {f'pigou_time_to_first_token_seconds_bucket{{le="{le}"}}': f"0+{count}x30"
       for le, count in (("0.1", 0), ("1", 100), ("+Inf", 100))},
    16: {'pigou_tier_restored_blocks_total{worker="a",tier="disk"}': "0+60x30",
         'pigou_tier_queued_blocks{worker="a",tier="disk"}': "2000x30"},
    17: {'pigou_worker_running{worker="a"}': "0.1x30", "pigou_requests_queued": "0x30",
         'pigou_generation_tokens_total{tenant="a"}': "0+60x30"},
    18: {"pigou_game_saturation_state": "2x30", "pigou_requests_queued": "5x30",
         'pigou_generation_tokens_total{tenant="a"}': "0+6000x30"},
    19: {'pigou_requests_total{route="/v1/completions",status="502"}': "0+30x30",
         "pigou_requests_queued": "0+60x30",
         "pigou_requests_shed_total": "0x30"},
}  # fmt: skip
#: A busy fleet without a fault; a worker of it was started anew, and its prefill worker computes.
HEALTHY = {
    'pigou_worker_restarts_total{worker="a"}': "0x12 1x20",
    'pigou_lora_loads_total{worker="a"}': "0+60x30",  # often, and each in 10 ms of 550
    'pigou_lora_load_seconds_total{worker="a"}': "0+0.6x30",
    **{f'pigou_time_to_first_token_seconds_bucket{{le="{le}"}}': f"0+{count}x30"
       for le, count in (("0.1", 0), ("1", 100), ("+Inf", 100))},
    'pigou_worker_out_of_memory_total{worker="a"}': "0x30",
    'vllm:kv_cache_usage_perc{worker="a"}': "0.97x30",
    'vllm:num_preemptions_total{worker="a"}': "7x30",
    'vllm:prefix_cache_hits_total{worker="a"}': "0+600x30",
    'vllm:prefix_cache_queries_total{worker="a"}': "0+1000x30",
    "pigou_requests_queued": "0 3 1 0 4 0x26",
    'pigou_cache_stale_hits_total{layer="semantic"}': "0+1x30",
    'pigou_cache_hits_total{layer="semantic"}': "0+100x30",
    **{f'pigou_prompt_wait_seconds_bucket{{length="short",le="{le}"}}': f"0+{count}x30"
       for le, count in (("0.1", 50), ("1", 100), ("+Inf", 100))},
    **{f'pigou_prompt_begun_tokens_bucket{{le="{le}"}}': "0+100x30" for le in ("65536", "+Inf")},
    "pigou_prompt_longest_wait_seconds": "3x30",
    'pigou_queue_wait_seconds_bucket{le="0.1"}': "0+100x30",
    'pigou_queue_wait_seconds_bucket{le="+Inf"}': "0+100x30",
    'pigou_kv_idle_tokens{worker="a",tenant="x"}': "900x30",
    'pigou_kv_blocks{worker="a"}': "1000x30", 'pigou_kv_block_tokens{worker="a"}': "16x30",
    "pigou_requests_repeated_total": "0+1x30", "pigou_requests_shed_total": "0x30",
    'pigou_requests_total{route="/v1/completions",status="200"}': "0+600x30",
    'pigou_requests_total{route="/v1/completions",status="502"}': "0+1x30",
    **{f'pigou_inter_token_latency_seconds_bucket{{le="{le}"}}': f"0+{count}x30"
       for le, count in (("0.01", 60), ("0.1", 90), ("1", 100), ("+Inf", 100))},
    'pigou_game_prefill_busy_ratio{worker="p"}': "0.5x30",
    'pigou_worker_up{worker="p",role="prefill"}': "1x30",
    'pigou_worker_kv_usage_ratio{worker="a"}': "0.4x30",
    'pigou_game_expected_itl_seconds{worker="a"}': "0.01x30",
    'pigou_stream_stalls_total{cause="client"}': "0x30",
    'pigou_stream_stalls_total{cause="engine"}': "0+1x30",
    'pigou_tier_restored_blocks_total{worker="a",tier="disk"}': "0+60x30",
    'pigou_tier_queued_blocks{worker="a",tier="disk"}': "10x30",
    'pigou_worker_running{worker="a"}': "12x30", "pigou_game_saturation_state": "2x30",
    **{f'pigou_generation_tokens_total{{tenant="{name}"}}': "0+6000x30" for name in "abc"},
}  # fmt: skip


def test_pages_that_are_made_of_the_definitions_are_current() -> None:
    for path, text in pages().items():
        assert path.read_text() == text, f"{path.name}: run python -m tools.diagnosis_pages"


def test_each_mode_has_a_playbook_and_links_to_it_work() -> None:
    page = (ROOT / "docs" / "guide" / "playbooks.md").read_text()
    headings = re.findall(r"^## (.*)$", page, re.M)
    assert headings == [f"{number} {mode.name}" for number, mode in MODES.items()]
    assert anchor(MODES[4]) == "4-prefix-miss-storm"
    assert max(map(len, page.split("\n## "))) < 1800, "a playbook is one screen"


def test_playbooks_and_alerts_name_metrics_that_are_exported() -> None:
    """`docs/reference/metrics.md` has what gateways and workers export, by other tests."""
    docs = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    known = set(re.findall(r"`((?:pigou_|vllm:)\w+)`", docs))
    for mode in MODES.values():
        text = " ".join((mode.alert, mode.smallest_fix, *mode.look))
        for name in re.findall(r"(?<!\w)(?:pigou_|vllm:)\w+", text):
            assert re.sub(r"_(bucket|sum|count)$", "", name) in known, (mode.name, name)


def test_promtool_takes_the_alerts_and_they_fire(tmp_path: Path) -> None:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    subprocess.run([program, "check", "rules", ALERTS], check=True, capture_output=True)
    alerts = {number: alert_name(mode) for number, mode in MODES.items() if mode.alert}
    assert SERIES.keys() == alerts.keys()
    tests: list[dict[str, Any]] = [
        {
            "interval": "1m",
            "input_series": [{"series": k, "values": v} for k, v in SERIES[mode].items()],
            "promql_expr_test": [{
                "expr": f'count(ALERTS{{alertname="{alerts[mode]}",alertstate="firing"}}) > bool 0',
                "eval_time": "80m" if mode in (4, 8) else "20m",
                "exp_samples": [{"labels": "{}", "value": 1}],
            }],
        }
        for mode in SERIES
    ]  # fmt: skip
    tests.append({
        "interval": "1m",
        "input_series": [{"series": k, "values": v} for k, v in HEALTHY.items()],
        "alert_rule_test": [{"eval_time": "20m", "alertname": name} for name in alerts.values()],
    })  # fmt: skip
    file = tmp_path / "alerts.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "tests": tests}))
    done = subprocess.run([program, "test", "rules", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
