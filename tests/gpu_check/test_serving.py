"""A worker with random weights is started, measured over HTTP, and stopped; here on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pigou.fleet.config import FleetError
from pigou.request import SamplingParams
from pigou.runtime.models.load import load
from pigou_lab.gpu_check.random_model import TINY, random_model, write_checkpoint
from pigou_lab.gpu_check.serving import measure_serving
from pigou_lab.gpu_check.speed import make_engine


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, TINY, torch.float32)
    return folder


def test_a_worker_streams_over_http_and_ends(checkpoint: Path) -> None:
    speeds = measure_serving(checkpoint, "cpu", (1, 32), timeout_s=300.0, prompt=16, output=8)
    assert [speed.streams for speed in speeds] == [1, 32]
    for speed in speeds:
        assert speed.ttft_s > 0
        assert speed.itl_s >= 0
        # All tokens took at least as long as those of the stream with the median TTFT did.
        assert 0 < speed.tokens_per_s <= speed.streams * 8 / speed.ttft_s


def test_a_checkpoint_has_the_weights_of_the_random_model(checkpoint: Path) -> None:
    prompt, params = [3, 70, 200, 9], SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    models = load(checkpoint), random_model(TINY, "cpu", torch.float32)
    [loaded], [made] = (make_engine(model, 1, 16).generate([prompt], params) for model in models)
    assert loaded.tokens == made.tokens


def test_a_checkpoint_that_cannot_be_served_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Unknown"]}))
    with pytest.raises(FleetError, match="ended with status"):
        measure_serving(tmp_path, "cpu", (1,), timeout_s=300.0)
