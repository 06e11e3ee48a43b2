"""Published models are mapped to their published sizes, or refused by name.

`published.json` has the expected sizes: parameters in billions, without layers that predict further
tokens, and sizes of checkpoints in GB where they are published, with the source of each.
"""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from pigou.config import ConfigError
from pigou.models.read import parse_architecture, read_architecture

PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "published.json").read_text()
)
ARCHIVE = (
    Path(os.environ.get("PIGOU_SHARED", Path(__file__).parents[3] / "shared"))
    / "published-configs.tar.zst"
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    zstandard = pytest.importorskip("zstandard")
    if not ARCHIVE.is_file():
        pytest.skip("no published configs (PIGOU_SHARED)")
    folder = tmp_path_factory.mktemp("configs")
    with ARCHIVE.open("rb") as packed:
        plain = zstandard.ZstdDecompressor().stream_reader(packed)
        with tarfile.open(fileobj=plain, mode="r|") as archive:
            archive.extractall(folder, filter="data")
    return folder / "published"


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_has_its_published_size(name: str, folders: Path) -> None:
    expected = PUBLISHED[name]
    if "refused" in expected:
        with pytest.raises(ConfigError, match=expected["refused"]):
            read_architecture(folders / name)
        return
    model = read_architecture(folders / name)
    assert model.parameters / 1e9 == pytest.approx(expected["billions"], rel=0.03)
    if "gigabytes" in expected:
        assert model.checkpoint_bytes / 1e9 == pytest.approx(expected["gigabytes"], rel=0.03)


def test_every_config_of_the_archive_is_in_the_table(folders: Path) -> None:
    assert {folder.name for folder in folders.iterdir()} == set(PUBLISHED)


#: Families whose config class transformers can build a model of by default.
FAMILIES = [
    "llama", "mistral", "ministral3", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
    "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo", "olmo2", "olmo3", "olmoe",
    "granite", "granitemoe", "gemma", "gemma2", "gemma3_text", "phi3", "phi", "phimoe",
    "stablelm", "internlm3", "smollm3", "glm", "glm4", "glm4_moe", "glm4_moe_lite",
    "glm_moe_dsa", "seed_oss", "cohere", "cohere2", "exaone4", "nemotron_h", "starcoder2",
    "arcee", "gpt_neox", "deepseek_v3", "deepseek_v32", "deepseek_v4", "llama4_text",
    "gpt_oss", "minimax_m2", "kimi_linear", "ernie4_5", "ernie4_5_moe",
]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_counts_as_transformers_does(family: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family)
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(config)
    expected = sum({id(p): p.numel() for p in theirs.parameters()}.values())
    ours = parse_architecture(Path(family), config.to_dict(), family)
    assert ours.parameters == pytest.approx(expected, rel=1e-4)
