"""Quantised weights: their products, formats and files."""

from __future__ import annotations

import json
from dataclasses import replace
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
from pigou.models import ModelError
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


@pytest.mark.skipif(
    not Int8Product.supports(torch.zeros(64, 64, dtype=torch.int8), 0),
    reason="this CPU has no AVX-512 VNNI: int8 products are PyTorch's, by floats",
)
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


# --- quantised checkpoints ----------------------------------------------------------------------

Parts = dict[str, torch.Tensor]


def packed(numbers: torch.Tensor, axis: int, order: tuple[int, ...] = tuple(range(8))) -> Any:
    """int32 words of 8 numbers of 4 bits along an axis."""
    words = torch.zeros_like(numbers.movedim(axis, -1)[..., ::8].movedim(-1, axis)).long()
    for at, place in enumerate(order):
        words |= numbers.movedim(axis, -1)[..., place::8].movedim(-1, axis).long() << (4 * at)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def fp8(weight: torch.Tensor, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """FP8 codes of blocks, their scales, and the plain numbers."""
    blocks = [[part.abs().amax() / 448 for part in line.split(columns, 1)]
              for line in weight.split(rows, 0)]  # fmt: skip
    scales = torch.tensor(blocks)
    wide = scales.repeat_interleave(rows, 0)[: len(weight)]
    wide = wide.repeat_interleave(columns, 1)[:, : weight.shape[1]]
    codes = (weight / wide).to(FP8)
    return codes, scales, codes.float() * wide


def int4(weight: torch.Tensor, group: int, symmetric: bool) -> tuple[torch.Tensor, ...]:
    """Codes (0 to 15), zeros and scales (outputs, groups), and the plain numbers."""
    parts = weight.view(len(weight), -1, group)
    low, high = parts.amin(2), parts.amax(2)
    scales = parts.abs().amax(2) / 7 if symmetric else (high - low) / 15
    zeros = torch.full_like(scales, 8) if symmetric else (-low / scales).round().clamp(1, 15)
    codes = ((parts / scales[..., None]).round() + zeros[..., None]).clamp(0, 15)
    plain = ((codes - zeros[..., None]) * scales[..., None]).view_as(weight)
    return codes.view_as(weight).int(), zeros.int(), scales, plain


def quantise(scheme: str, weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:  # noqa: PLR0911
    """Tensors of a module in a scheme, and its plain numbers."""
    outputs, inputs = weight.shape
    match scheme.split():
        case ["fp8", "blocks"]:
            codes, scales, plain = fp8(weight, 40, 40)
            return {"weight": codes, "weight_scale_inv": scales}, plain
        case ["fp8" | "modelopt", "tensor"]:
            codes, scales, plain = fp8(weight, outputs, inputs)
            return {"weight": codes, "weight_scale": scales.flatten()[0]}, plain
        case ["compressed", "fp8"]:
            codes, scales, plain = fp8(weight, 1, inputs)
            return {"weight": codes, "weight_scale": scales}, plain
        case ["compressed", "int8"]:
            matrix = WeightMatrix(weight).quantised(torch.int8)
            assert matrix.scales is not None
            tensors = {"weight": matrix.data, "weight_scale": matrix.scales}
            return tensors, matrix.dense(torch.float32)
        case ["compressed", "int4", kind]:
            codes, zeros, scales, plain = int4(weight, 32, kind == "symmetric")
            tensors = {"weight_packed": packed(codes, 1), "weight_scale": scales,
                       "weight_shape": torch.tensor([outputs, inputs])}  # fmt: skip
            if kind != "symmetric":
                tensors["weight_zero_point"] = packed(zeros, 0)
            return tensors, plain
        case ["gptq", *shuffled]:
            place = torch.randperm(inputs) if shuffled else torch.arange(inputs)
            codes, zeros, scales, plain = int4(weight[:, place.argsort()], 32, symmetric=False)
            return {
                "qweight": packed(codes[:, place].T, 0), "qzeros": packed(zeros.T - 1, 1),
                "scales": scales.T, "g_idx": (place // 32).int(),
            }, plain[:, place]  # fmt: skip
    codes, zeros, scales, plain = int4(weight, 32, symmetric=False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {"qweight": packed(codes.T, 1, order), "qzeros": packed(zeros.T, 1, order),
            "scales": scales.T}, plain  # fmt: skip


def compressed(kind: str, bits: int, **more: object) -> dict[str, Any]:
    weights = {"type": kind, "num_bits": bits, **more}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors", "ignore": ["lm_head", "re:.*layers.1.*down_proj"],
        "config_groups": {"group_0": group},
    }  # fmt: skip


SCHEMES: dict[str, dict[str, Any]] = {
    "fp8 blocks": {"quant_method": "fp8", "weight_block_size": [40, 40]},
    "fp8 tensor": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "modelopt tensor": {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
    "compressed fp8": compressed("float", 8),
    "compressed int8": compressed("int", 8, strategy="channel"),
    "compressed int4 symmetric": compressed("int", 4, group_size=32, symmetric=True),
    "compressed int4 asymmetric": compressed("int", 4, group_size=32, symmetric=False),
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32},
    "gptq shuffled": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32},
}


def write_quantised(folder: Path, scheme: str) -> tuple[Path, Path]:
    """A checkpoint in a scheme, and the plain one of its numbers."""
    plain_config = make_config("qwen3", num_hidden_layers=2)
    config = plain_config | {"quantization_config": SCHEMES[scheme]}
    plain = make_tensors(plain_config)
    tensors = dict(plain)
    for name in products(plain):
        if "ignore" in SCHEMES[scheme] and "layers.1.mlp.down_proj" in name:
            continue
        del tensors[name]
        parts, plain[name] = quantise(scheme, plain[name])
        module = name.removesuffix(".weight")
        tensors |= {f"{module}.{part}": tensor for part, tensor in parts.items()}
    if SCHEMES[scheme]["quant_method"] == "modelopt":
        name = "model.layers.1.mlp.down_proj"
        for part in ("weight", "weight_scale"):
            tensors.pop(f"{name}.{part}", None)
        parts, plain[f"{name}.weight"] = quantise(scheme, plain[f"{name}.weight"])
        tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
    model = write_plain(folder / "model", config, tensors)
    return model, write_plain(folder / "plain", plain_config, plain)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_quantised_checkpoint_is_served_as_its_plain_numbers(scheme: str, tmp_path: Path) -> None:
    checked(*write_quantised(tmp_path, scheme))


def static_keys(scheme: str) -> dict[str, Any]:
    """quantization_config of FP8 with static activation scales."""
    if scheme != "compressed":
        return SCHEMES["modelopt tensor"] if scheme == "modelopt" else {
            "quant_method": "fp8", "activation_scheme": scheme,
        }  # fmt: skip
    keys = compressed("float", 8, strategy="tensor")
    inputs = {"type": "float", "num_bits": 8, "dynamic": False, "strategy": "tensor"}
    keys["config_groups"]["group_0"]["input_activations"] = inputs
    return keys


@pytest.mark.parametrize("scheme", ["static", "modelopt", "compressed", "dynamic"])
def test_inputs_of_fp8_are_rounded_by_their_static_scale(scheme: str, tmp_path: Path) -> None:
    plain_config = make_config("qwen3", num_hidden_layers=1)
    plain = make_tensors(plain_config)
    tensors, inputs = dict(plain), {}
    for at, name in enumerate(products(plain)):
        module = name.removesuffix(".weight")
        parts, plain[name] = quantise("fp8 tensor", tensors.pop(name))
        inputs[module] = 0.002 + 0.001 * (at % 5)  # some inputs exceed 448 times that
        parts["input_scale"] = torch.tensor(inputs[module])
        tensors |= {f"{module}.{part}": tensor for part, tensor in parts.items()}
    config = plain_config | {"quantization_config": static_keys(scheme)}
    layer: Any = load(write_plain(tmp_path / "m", config, tensors), "fp32").decoder.layers[0]
    attention, mlp = "model.layers.0.self_attn", "model.layers.0.mlp"
    for product, names in (
        (layer.qkv, [f"{attention}.{name}_proj" for name in "qkv"]),
        (layer.output, [f"{attention}.o_proj"]),
        (layer.mlp.gate_up, [f"{mlp}.gate_proj", f"{mlp}.up_proj"]),
        (layer.mlp.down, [f"{mlp}.down_proj"]),
    ):
        weight = torch.cat([plain[f"{name}.weight"] for name in names])
        x = noise(9, weight.shape[1])
        rounded = x
        if scheme != "dynamic":
            scale = max(inputs[name] for name in names)  # vLLM's, of fused projections
            rounded = (x / scale).clamp(-448, 448).to(FP8).float() * scale
            assert error(rounded, x) > 0.02
        assert error(product(x), rounded @ weight.T) < 1e-5


def test_a_static_scale_that_is_no_scale_is_refused(tmp_path: Path) -> None:
    config = make_config("qwen3", num_hidden_layers=1)
    tensors = make_tensors(config)
    for name in products(tensors):
        parts, _ = quantise("fp8 tensor", tensors.pop(name))
        parts["input_scale"] = torch.tensor(0.0)
        tensors |= {f"{name.removesuffix('.weight')}.{part}": t for part, t in parts.items()}
    config |= {"quantization_config": static_keys("static")}
    with pytest.raises(ModelError, match=r"_proj\.input_scale is 0\.0; it must be positive"):
        load(write_plain(tmp_path / "m", config, tensors), "fp32")


def test_a_quantised_matrix_keeps_its_static_scale_until_its_format_changes() -> None:
    weight = replace(WeightMatrix(noise(32, 64)).quantised(FP8), input_scale=0.005)
    x = noise(5, 64)
    rounded = (x / 0.005).clamp(-448, 448).to(FP8).float() * 0.005
    wanted = rounded @ weight.dense(torch.float32).T
    for matrix in (weight, weight.to(torch.device("cpu")), concatenate([weight])):
        assert error(make_linear(matrix, None, torch.float32)(x), wanted) < 1e-5
    assert weight.rows(0, 8).input_scale == weight.columns(0, 8).input_scale == 0.005
    assert weight.quantised(torch.int8).input_scale is None
    assert concatenate([weight, WeightMatrix(noise(3, 64))]).input_scale is None


@pytest.mark.parametrize(("keys", "message"), [
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
    ({"quant_method": "hqq", "nbits": 4}, "hqq"),
])  # fmt: skip
def test_other_formats_are_refused_by_name(
    keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = make_config("llama")
    model = write_plain(
        tmp_path / "m", config | {"quantization_config": keys}, make_tensors(config)
    )
    with pytest.raises(ModelError, match=message):
        load(model, "fp32")


def test_missing_scales_are_refused(tmp_path: Path) -> None:
    config = make_config("qwen3") | {"quantization_config": SCHEMES["gptq"]}
    tensors = make_tensors(config)
    first = "model.layers.0.mlp.gate_proj"
    parts, _ = quantise("gptq", tensors.pop(f"{first}.weight"))
    named = {f"{first}.{part}": t for part, t in parts.items() if part != "scales"}
    model = write_plain(tmp_path / "n", config, tensors | named)
    with pytest.raises(ModelError, match="no scale"):
        load(model, "fp32")
