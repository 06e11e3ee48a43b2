"""The memory that a worker measures at its start."""

from __future__ import annotations

import json

import numpy as np
import pytest

from pigou.models import bundled_path
from pigou.runtime.memory_report import measured, tensor_bytes
from pigou.runtime.models.load import load
from pigou.worker.config import WorkerConfig
from pigou.worker.startup.build import build

torch = pytest.importorskip("torch")


def test_the_peak_of_a_run_is_what_it_needed_for_a_while() -> None:
    def run() -> int:
        return int(np.ones(256 * 2**20, dtype=np.uint8).sum())

    tries = [measured(run, torch.device("cpu"), 1000, 2000) for _ in range(3)]
    assert {result for result, _ in tries} == {256 * 2**20}
    # The system may reclaim idle pages of the process meanwhile: a quarter of the peak is enough.
    report = max((report for _, report in tries), key=lambda report: report.activations)
    assert report.activations > 64 * 2**20
    assert (report.weights, report.cache, report.adapters, report.graphs) == (1000, 2000, 0, 0)
    assert report.runtime + report.scratch < report.memory


def test_a_tensor_that_is_used_twice_counts_once() -> None:
    one = torch.zeros(10, dtype=torch.float32)
    assert tensor_bytes([one, {"again": one.view(2, 5)}, (torch.zeros(3),)]) == 52


def test_a_draft_model_counts_with_its_weights_and_cache() -> None:
    folder, report = bundled_path(), {}
    for drafting in ("", json.dumps({"model": str(folder), "num_speculative_tokens": 2})):
        parts = build(WorkerConfig(
            model="bundled", blocks=16, max_model_len=128, kv_transfer="none",
            speculative_config=drafting,
        ))  # fmt: skip
        assert parts.measure is not None
        report[bool(drafting)] = parts.measure(lambda: ())[1]
    alone, drafted = report[False], report[True]
    assert drafted.weights - alone.weights == tensor_bytes(load(folder).decoder)
    assert drafted.cache == 2 * alone.cache
