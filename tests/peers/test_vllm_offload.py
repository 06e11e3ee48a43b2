"""vLLM's OffloadingConnector in a real engine, with Pigou's policy and tier: the same tokens."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lib.peers import python_path

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1200)]
ROOT = Path(__file__).parents[2]
HITS = "vllm:external_prefix_cache_hits"


@pytest.fixture(scope="module")
def said(
    vllm_venv: Path, peer_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What `vllm_offload_engine` printed, and its log."""
    folder = tmp_path_factory.mktemp("vllm-offload")
    env = {
        **os.environ, "PYTHONPATH": os.pathsep.join([python_path(folder / "links"), str(ROOT)]),
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }  # fmt: skip
    done = subprocess.run(
        [str(vllm_venv / "bin/python"), "-m", "tests.peers.vllm_offload_engine", str(peer_model),
         str(folder)],
        cwd=ROOT, env=env, text=True, capture_output=True, check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, done.stderr[-5_000:]
    return {**json.loads(lines[0].removeprefix("RESULT")), "log": done.stdout + done.stderr}


def test_tokens_are_those_of_an_engine_without_tiers(said: dict[str, Any]) -> None:
    for phase in ("first", "second", "third", "salted", "corrupted"):
        assert said[phase] == said["alone"], phase


def test_hits_come_from_the_disk(said: dict[str, Any]) -> None:
    counters = said["third counters"]
    assert counters[HITS] >= 640
    assert counters["vllm:kv_offload_tiering_chunk_hits:1:PigouTier"] >= 20
    assert counters["vllm:kv_offload_tiering_read_bytes:1:PigouTier"] > 0


def test_another_salt_misses(said: dict[str, Any]) -> None:
    assert said["salted counters"][HITS] == said["third counters"][HITS]


def test_a_corrupted_store_is_computed(said: dict[str, Any]) -> None:
    assert said["corrupted counters"][HITS] == said["salted counters"][HITS]
    assert said["corrupted counters"]["vllm:kv_offload_pigou_failed"] > 0


def test_stock_vllm_copies_to_its_cpu_tier_on_gpus_only(said: dict[str, Any]) -> None:
    assert "CPU Offloading is currently only supported on CUDA-alike" in said["log"]
    assert "stock" in said
