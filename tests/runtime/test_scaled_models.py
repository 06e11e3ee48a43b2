"""Scaled and windowed models compute what transformers computes, over the context vLLM gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import ARCHITECTURES, BASE, FAMILIES, VOCAB, make_config, write_checkpoint

from pigou.config import EngineConfig
from pigou.models import ModelError
from pigou.request import SamplingParams
from pigou.runtime.local_engine import LocalEngine
from pigou.runtime.models.load import load
from pigou.runtime.models.model_config import parse_config
from pigou.runtime.models.rotary_embedding import read_rope
from reference import Reference

HALF = 16  # of the widest head_dim of the families here, 32
SHORT = {8: [1.0 + i / 8 for i in range(8)], HALF: [1.0 + i / 16 for i in range(HALF)]}
LONG = {n: [x * 4 for x in values] for n, values in SHORT.items()}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
#: Scaling -> parameters, and the context that vLLM works out from 64 positions.
SCALINGS: dict[str, tuple[dict[str, Any], int]] = {
    "default": ({"rope_type": "default"}, 64),
    "linear": ({"rope_type": "linear", "factor": 2.0}, 128),
    "linear-old-key": ({"type": "linear", "factor": 2.5}, 160),
    "dynamic": ({"rope_type": "dynamic", "factor": 3.0}, 192),
    "llama3": ({**LLAMA3, "original_max_position_embeddings": 32}, 64),
    "llama3-bare": (LLAMA3, 64),
    "yarn": ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
    "yarn-bare": ({"type": "yarn", "factor": 4.0}, 256),
    "yarn-mscale": (
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "mscale": 0.7,
            "mscale_all_dim": 1.2,
            "original_max_position_embeddings": 64,
        },
        256,
    ),
    "yarn-finetuned": (
        {
            "type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": 64,
            "finetuned": True,
            "truncate": False,
        },
        128,
    ),
    "longrope": ({"rope_type": "longrope", "original_max_position_embeddings": 32}, 64),
    "su": ({"type": "su", "original_max_position_embeddings": 32, "factor": 2.0}, 64),
}


def config_of(family: str, scaling: str, new_style: bool = False) -> dict[str, Any]:
    rope = dict(SCALINGS[scaling][0])
    config = make_config(family, max_position_embeddings=64)
    if scaling in ("longrope", "su"):
        half = (config.get("head_dim") or 16) // 2
        rope |= {"short_factor": SHORT[half], "long_factor": LONG[half]}
    if not new_style:
        return {**config, "rope_scaling": rope}
    del config["rope_theta"]
    return {**config, "rope_parameters": {**rope, "rope_theta": 10000.0}}


def logits_of(folder: Path, tokens: list[int], longest: int) -> torch.Tensor:
    """Log-probabilities of a prompt's tokens as the runtime computes them, in chunks."""
    config = EngineConfig(blocks=64, max_model_len=longest, max_batched_tokens=24)
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, prompt_logprobs=VOCAB)
    [output] = LocalEngine(load(folder, "fp32"), config).generate([tokens], params)
    rows = []
    for report in output.prompt_logprobs[1:]:
        assert report is not None
        row = torch.empty(VOCAB)
        row[torch.from_numpy(report.top)] = torch.from_numpy(report.logprobs)
        rows.append(row)
    return torch.stack(rows)


def check(folder: Path, length: int, longest: int, reference: torch.Tensor | None = None) -> None:
    tokens = np.random.default_rng(length).integers(3, VOCAB, size=length).tolist()
    if reference is None:
        reference = Reference(folder).logits(tokens)
    ours = logits_of(folder, tokens, longest)
    torch.testing.assert_close(ours, reference[:-1].log_softmax(-1), rtol=1e-4, atol=2e-4)


def in_transformers_words(scaling: str, config: dict[str, Any]) -> dict[str, Any]:
    """transformers calls `su` longrope."""
    rope = dict(config["rope_scaling"])
    if scaling == "su":
        rope = {**rope, "rope_type": "longrope", "type": "longrope"}
    return {**config, "rope_scaling": rope}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_logits_are_those_of_transformers(family: str, scaling: str, tmp_path: Path) -> None:
    config = in_transformers_words(scaling, config_of(family, scaling))
    folder = write_checkpoint(tmp_path, config)
    context = load(folder, "fp32").config.context
    long = scaling in ("longrope", "su")
    # Dynamic scaling beyond the trained length has a test of its own.
    length = 64 if scaling == "dynamic" else context
    check(folder, length - 1, context)
    if long:  # an engine within the trained length takes the short factors
        check(folder, 31, 32)


@pytest.mark.parametrize("family", FAMILIES)
def test_dynamic_scaling_is_that_of_transformers_decoding(family: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, config_of(family, "dynamic"))
    tokens = np.random.default_rng(90).integers(3, VOCAB, size=90).tolist()
    model = Reference(folder).model
    rows, cache = [], None
    with torch.inference_mode():
        for token in tokens:
            out = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            rows.append(out.logits[0, -1].float())
    check(folder, 90, 192, torch.stack(rows))


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("new_style", [False, True])
def test_scaling_lengthens_the_context_as_vllm_does(scaling: str, new_style: bool) -> None:
    assert parse_config(config_of("llama", scaling, new_style)).context == SCALINGS[scaling][1]


def test_an_engine_may_use_the_lengthened_context_and_no_more(tmp_path: Path) -> None:
    model = load(write_checkpoint(tmp_path, config_of("llama", "yarn")))
    LocalEngine(model, EngineConfig(blocks=16, max_model_len=128))
    with pytest.raises(ModelError, match="context of 128"):
        LocalEngine(model, EngineConfig(blocks=16, max_model_len=129))


def test_yarn_s_factor_follows_from_the_lengths_when_it_is_absent() -> None:
    rope = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 16}
    config = make_config("llama", max_position_embeddings=64, rope_scaling=rope)
    same = make_config("llama", max_position_embeddings=64, rope_scaling={**rope, "factor": 4.0})
    assert parse_config(config).context == 64
    assert np.array_equal(read_rope(config, 16).frequencies, read_rope(same, 16).frequencies)


def test_the_trained_length_may_stand_beside_the_rope_parameters() -> None:
    rope = {"rope_type": "yarn", "factor": 4.0}
    inside = {**rope, "original_max_position_embeddings": 16}
    config = make_config("llama", max_position_embeddings=64)
    beside = {**config, "rope_scaling": rope, "original_max_position_embeddings": 16}
    within = {**config, "rope_scaling": inside}
    assert parse_config(beside).context == parse_config(within).context == 64
    assert np.array_equal(read_rope(beside, 16).frequencies, read_rope(within, 16).frequencies)


def test_rope_parameters_by_type_of_layer_are_read_where_they_agree() -> None:
    one = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}
    config = make_config("qwen3")
    config["rope_parameters"] = {"full_attention": one, "sliding_attention": dict(one)}
    expected = read_rope({**make_config("qwen3"), "rope_parameters": one}, 32)
    assert np.array_equal(read_rope(config, 32).frequencies, expected.frequencies)
    config["rope_parameters"]["sliding_attention"]["rope_theta"] = 1.0
    with pytest.raises(ModelError, match="differ by type of layer"):
        read_rope(config, 32)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, ()),
        ({"sliding_window": 100}, ()),
        ({"sliding_window": 100, "use_sliding_window": True}, ()),  # 28 layers are whole
        ({"sliding_window": 100, "use_sliding_window": True, "max_window_layers": 2}, ()),
        ({"sliding_window": 100, "use_sliding_window": True, "max_window_layers": 1}, (0, 100)),
        ({"sliding_window": 100, "use_sliding_window": True, "max_window_layers": 0}, (100, 100)),
        ({"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0}, ()),
        (
            {
                "sliding_window": 100,
                "use_sliding_window": True,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            (0, 100),
        ),
        (
            {
                "sliding_window": 100,
                "use_sliding_window": True,
                "max_window_layers": 0,
                "layer_types": ["full_attention"] * 2,
            },
            (),
        ),
    ],
)
def test_a_window_is_that_of_the_layers_that_slide(
    family: str, changes: dict[str, Any], windows: tuple[int, ...]
) -> None:
    config = make_config(family, **changes)
    ours = parse_config(config)
    assert ours.context == 512
    assert tuple(form.window for form in ours.attention) == windows
    theirs = transformers_config(config)
    slides = theirs.sliding_window is not None and "sliding_attention" in theirs.layer_types
    assert slides == any(windows)


def transformers_config(config: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    given = {k: v for k, v in config.items() if k not in ("model_type", "architectures")}
    return AutoConfig.for_model(config["model_type"], **given)


KEYS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps",
    "tie_word_embeddings", "rope_theta", "attention_bias", "hidden_act",
)  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("key", [*KEYS, "architectures"])
def test_a_key_that_is_absent_is_filled_in_as_transformers_does(family: str, key: str) -> None:
    sizes = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
    config = make_config(family, **sizes)
    config.pop("head_dim", None)
    config.pop(key, None)
    ours, theirs = parse_config(config), transformers_config(config)
    assert ours.vocab == theirs.vocab_size
    assert ours.hidden == theirs.hidden_size
    assert ours.ffn == theirs.intermediate_size
    assert ours.layers == theirs.num_hidden_layers
    assert ours.heads == theirs.num_attention_heads
    assert ours.kv_heads == theirs.num_key_value_heads
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert ours.head_dim == head_dim
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.tied == theirs.tie_word_embeddings
    base = theirs.rope_parameters["rope_theta"]
    assert ours.rope.frequencies[1] == pytest.approx(base ** (-2 / head_dim), rel=1e-5)
    assert ours.context == theirs.max_position_embeddings


def test_a_mistral_without_a_window_key_slides_as_in_transformers() -> None:
    config = make_config("mistral", max_position_embeddings=32768)
    del config["sliding_window"]
    windows = {form.window for form in parse_config(config).attention}
    assert windows == {transformers_config(config).sliding_window} == {4096}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_of_nothing_but_its_family_is_transformers_default(family: str) -> None:
    ours = parse_config({"architectures": [ARCHITECTURES[family]]})
    theirs = transformers_config({"model_type": family})
    assert (ours.layers, ours.hidden, ours.ffn) == (
        theirs.num_hidden_layers, theirs.hidden_size, theirs.intermediate_size,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"compression_config": {"bits": 4}}, "quant_method is ''"),
        ({"rope_scaling": [1]}, "must be an object"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": float("inf")}}, "factor is inf"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "short_factor"),
        ({"rope_scaling": {"rope_type": "mrope", "factor": 2.0}}, "'mrope'"),
        ({"max_position_embeddings": 0}, "max_position_embeddings"),
    ],
)
def test_impossible_values_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse_config({**BASE, "architectures": ["LlamaForCausalLM"], **changes})
