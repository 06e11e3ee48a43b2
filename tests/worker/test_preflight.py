"""What no worker could start with is refused before one is started, without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pigou.config import ConfigError
from pigou.models import bundled_path
from pigou.worker.config import WorkerConfig
from pigou.worker.startup.preflight import check_worker

LLAMA: dict[str, Any] = json.loads((bundled_path() / "config.json").read_text())


def folder(path: Path, config: dict[str, Any] | None, weights: str = "model.safetensors") -> str:
    path.mkdir(exist_ok=True)
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    if weights:
        (path / weights).touch()
    return str(path)


@pytest.mark.parametrize(
    ("config", "weights", "words"),
    [
        (None, "model.safetensors", "a folder without config.json"),
        (LLAMA, "", "has no .*safetensors file"),
        (LLAMA, "pytorch_model.bin", "pytorch_model.bin is PyTorch's; convert it"),
        (LLAMA | {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
         "model.safetensors", "quant_method is 'bitsandbytes', which no worker reads"),
        (LLAMA | {"quantization_config": {"quant_method": "hqq"}}, "model.safetensors", "'hqq'"),
        (LLAMA | {"architectures": ["GemmaForCausalLM"], "model_type": "gemma"}, "m.bin",
         "not supported; supported: llama"),
        (LLAMA | {"architectures": ["NewForCausalLM"], "model_type": "new"}, "m.bin", "'new'"),
        (LLAMA | {"hidden_act": "gelu"}, "m.bin", "hidden_act 'gelu' is not supported"),
    ],
)  # fmt: skip
def test_a_folder_that_no_worker_runs_is_refused(
    config: dict[str, Any] | None, weights: str, words: str, tmp_path: Path
) -> None:
    model = folder(tmp_path / "m", config, weights)
    with pytest.raises(ConfigError, match=words):
        check_worker(WorkerConfig(model=model, model_impl="pigou"))


def test_families_of_transformers_pass_where_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gemma = LLAMA | {"architectures": ["GemmaForCausalLM"], "model_type": "gemma"}
    monkeypatch.setattr("pigou.models.read.find_spec", lambda _: object())
    check_worker(WorkerConfig(model=folder(tmp_path / "m", gemma)))
    ranks = WorkerConfig(model=folder(tmp_path / "m", gemma), tensor_parallel_size=2)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size is 2, .* in one process alone"):
        check_worker(ranks)
    quantized = folder(tmp_path / "q", gemma | {"quantization_config": {"quant_method": "awq"}})
    with pytest.raises(ConfigError, match="transformers' models have MXFP4 alone"):
        check_worker(WorkerConfig(model=quantized))
    monkeypatch.setattr("pigou.models.read.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"install pigou\[transformers\]"):
        check_worker(WorkerConfig(model=folder(tmp_path / "m", gemma)))


def test_a_missing_shard_is_refused_by_name(tmp_path: Path) -> None:
    model = folder(tmp_path / "m", LLAMA, "model-00001-of-00002.safetensors")
    names = {str(number): f"model-0000{number}-of-00002.safetensors" for number in (1, 2)}
    index = tmp_path / "m" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    with pytest.raises(ConfigError, match=r"model-00002-of-00002\.safetensors is missing"):
        check_worker(WorkerConfig(model=model))


def test_models_that_workers_run_pass(tmp_path: Path) -> None:
    check_worker(WorkerConfig())
    check_worker(WorkerConfig(model=folder(tmp_path / "m", LLAMA)))
    check_worker(WorkerConfig(model="owner/on-the-hub"))
    check_worker(WorkerConfig(model="/nowhere", executor="sleep", device="cuda"))


def test_a_broken_configuration_names_its_file(tmp_path: Path) -> None:
    model = folder(tmp_path / "m", LLAMA)
    (tmp_path / "m" / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json"):
        check_worker(WorkerConfig(model=model))


def test_a_check_loads_no_torch() -> None:
    code = (
        "import sys; from pigou.worker.startup.preflight import check_worker;"
        "from pigou.worker.config import WorkerConfig; check_worker(WorkerConfig());"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
