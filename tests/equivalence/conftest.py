"""A tiny random model in fp32, and the reference over it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from pigou.runtime.models.load import LoadedModel, load

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))

from checkpoints import make_config, write_checkpoint
from pair import Reference


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("random-llama")
    write_checkpoint(folder, make_config("llama", eos_token_id=2), seed=3)
    return load(folder, "fp32")


@pytest.fixture(scope="session")
def experts(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """Return a tiny model with routed experts."""
    folder = tmp_path_factory.mktemp("random-experts")
    write_checkpoint(folder, make_config("qwen3_moe", eos_token_id=2), seed=3)
    return load(folder, "fp32")


@pytest.fixture(scope="session")
def reference(model: LoadedModel) -> Reference:
    return Reference(model)
