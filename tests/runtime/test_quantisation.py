"""Quantised weights: their products, formats and files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from tests.runtime.checkpoints import FAMILIES, VOCAB, make_config, make_tensors
from tests.runtime.reference import Reference, make_prompts

from pigou.config import EngineConfig
from pigou.request import SamplingParams
from pigou.runtime.local_engine import LocalEngine
from pigou.runtime.models.int8_product import Int8Product
from pigou.runtime.models.linear import FP8, WeightMatrix, concatenate, make_linear
from pigou.runtime.models.load import load

DTYPES = (torch.float32, torch.bfloat16)
#: Outputs, inputs, group.
SHAPES = [(100, 90, 0), (96, 64, 0), (64, 128, 32), (7, 24, 8)]


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def grouped(weight: torch.Tensor, group: int) -> WeightMatrix:
    parts = weight.view(len(weight), -1, group or weight.shape[1])
    scales = parts.abs().amax(2) / 127
    return WeightMatrix(
        (parts / scales[..., None]).round().to(torch.int8).view_as(weight), scales, group
    )


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.float() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs", "group"), SHAPES)
def test_int8_products_equal_those_of_dequantised_weights(
    outputs: int, inputs: int, group: int, dtype: torch.dtype, kernel: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if not kernel:
        monkeypatch.setattr(Int8Product, "supports", staticmethod(lambda *_: False))
    matrix, bias = grouped(noise(outputs, inputs), group), noise(outputs, seed=1).to(dtype)
    product = make_linear(matrix, bias, dtype)
    for rows in (1, 2, 3, 17, 200):
        x = noise(rows, inputs, seed=rows).to(dtype)
        wanted = x.float() @ matrix.dense(torch.float32).T + bias.float()
        got = product(x)
        assert got.dtype is dtype
        assert error(got, wanted) < (6e-3 if dtype is torch.bfloat16 else 1e-4)


@given(st.integers(1, 40), st.integers(0, 39), st.floats(-6, 6))
def test_a_row_of_an_int8_product_depends_on_no_other(rows: int, row: int, power: float) -> None:
    product = make_linear(grouped(noise(70, 52), 0), None, torch.float32)
    x = noise(rows, 52, seed=rows)
    x[row % rows] *= 10.0**power
    alone = product(x[row % rows : row % rows + 1])
    assert torch.equal(product(x)[row % rows : row % rows + 1], alone)
    assert torch.isfinite(alone).all()


def test_rounding_to_e4m3_and_int8_has_the_known_errors() -> None:
    given = [0.3, 1.1, 17.0, 0.001, 240.0, -3.3, 448.0]
    wanted = [0.3125, 1.125, 16.0, 0.001953125, 240.0, -3.25, 448.0]
    rounded = WeightMatrix(torch.tensor([given])).quantised(FP8)
    assert float(rounded.scales) == 1.0
    assert rounded.dense(torch.float32).tolist() == [wanted]
    weight = noise(512, 128)
    assert error(WeightMatrix(weight).quantised(torch.int8).dense(torch.float32), weight) < 0.0068
    assert 0.024 < error(WeightMatrix(weight).quantised(FP8).dense(torch.float32), weight) < 0.028


def test_parts_of_a_matrix_are_those_of_its_numbers() -> None:
    matrix = grouped(noise(12, 64), 16)
    whole = matrix.dense(torch.float32)
    assert torch.equal(matrix.rows(3, 7).dense(torch.float32), whole[3:7])
    assert torch.equal(matrix.columns(16, 48).dense(torch.float32), whole[:, 16:48])
    parts = [matrix.rows(0, 5), matrix.rows(5, 12)]
    assert torch.equal(concatenate(parts).dense(torch.float32), whole)
    mixed = concatenate([matrix, WeightMatrix(noise(3, 64))])
    assert torch.equal(mixed.dense(torch.float32), torch.cat((whole, noise(3, 64))))
    with pytest.raises(ValueError, match="groups of 16"):
        matrix.columns(8, 24)


def checked(model: Path, plain: Path, quantization: str = "auto") -> None:
    """Logits are transformers' for the dequantised weights; tokens do not depend on chunks."""
    quantised, reference = load(model, "fp32", quantization=quantization), Reference(plain)
    prompts = make_prompts(6, VOCAB, 40)
    outputs = [
        [
            output.tokens
            for output in LocalEngine(
                quantised,
                EngineConfig(blocks=60, max_model_len=128, max_seqs=4, max_batched_tokens=tokens),
            ).generate(prompts, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
        ]
        for tokens in (7, 64)
    ]
    assert outputs[0] == outputs[1]
    reference.check(prompts, outputs[0])


def write_plain(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def products(tensors: dict[str, torch.Tensor]) -> list[str]:
    others = ("embed_tokens.weight", "lm_head.weight", ".gate.weight")
    return [name for name, t in tensors.items() if t.ndim == 2 and not name.endswith(others)]


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_quantised_when_loading_is_that_of_its_rounded_weights(
    family: str, quantization: str, tmp_path: Path
) -> None:
    config = make_config(family, tie_word_embeddings=False)
    tensors = make_tensors(config)
    model = write_plain(tmp_path / "model", config, tensors)
    kind, names = (torch.int8, ["lm_head.weight"]) if quantization == "int8" else (FP8, [])
    for name in [*products(tensors), *names]:
        tensors[name] = WeightMatrix(tensors[name]).quantised(kind).dense(torch.float32)
    checked(model, write_plain(tmp_path / "plain", config, tensors), quantization)
    digests = {load(model, "fp32", quantization=q).digest for q in ("auto", quantization)}
    assert len(digests) == 2
