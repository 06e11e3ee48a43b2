"""The row of a predictor that the benchmark trains for a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.lib.shared_folder import shared_folder
from benchmarks.token_eviction.pigou_side import PigouSide
from benchmarks.token_eviction.table import TRAINED
from benchmarks.token_eviction.task import Prepared, Task
from benchmarks.token_eviction.training import Training
from pigou.models import bundled_path
from pigou.runtime.token_eviction.predictor import PAPER, RETURNS
from tools.make_random_checkpoint import Shape, write_checkpoint

SHAPE = Shape(hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffn=96, vocab=640)
CORPUS = shared_folder() / "corpus"


def prepared(model: Path) -> Prepared:
    task = Task("streamed", str(model), 64, 0, 16, 32, 8)
    return Prepared(task, model, *[None] * 4)  # type: ignore[arg-type]


def test_only_a_model_without_a_predictor_has_the_row(tmp_path: Path) -> None:
    training = Training(CORPUS, 1, 4, 0.5)
    sizes = {"sinks": 4, "recent": 16, "rows": 1}
    named = PigouSide(**sizes, training=training)
    assert "pigou" + TRAINED in named.names(prepared(tmp_path))
    assert "pigou" + TRAINED not in named.names(prepared(bundled_path()))
    assert "pigou" + TRAINED not in PigouSide(**sizes).names(prepared(tmp_path))


def test_what_lies_there_is_not_trained_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = tmp_path / "model-trained"
    there.mkdir()
    report = {"arguments": ["train", "--sequences", "7"], "cpu_seconds": 12.0}
    (there / "training.json").write_text(json.dumps(report))
    assert Training(tmp_path / "none", 1, 4, 0.5).folder(tmp_path / "model") == there
    assert "--sequences 7 took 12 s of one core" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(not CORPUS.is_dir(), reason="no corpus (PIGOU_SHARED)")
def test_a_copy_of_the_model_gets_both_predictors(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", SHAPE, dtype="float32")
    there = Training(CORPUS, 1, 8, 0.5).folder(tmp_path / "model")
    names = {path.name for path in there.iterdir()}
    assert {RETURNS, PAPER, "model.safetensors", "training.json"} <= names
    assert not (tmp_path / "model" / RETURNS).exists()
