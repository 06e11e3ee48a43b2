"""The memory that a worker measures at its start."""

from __future__ import annotations

import numpy as np
import pytest

from pigou.runtime.memory_report import measured, tensor_bytes

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
