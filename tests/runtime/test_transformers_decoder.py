"""Decoders of transformers over our attention compute what transformers computes alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

pytest.importorskip("transformers")

import transformers
from families import FAMILIES, SIZES, VOCAB, write_family

from pigou.config import EngineConfig, EvictionConfig
from pigou.engine.plan import Plan, Rates
from pigou.models import ModelError, bundled_path
from pigou.request import Ints, SamplingParams
from pigou.runtime.attention.batch import make_batch
from pigou.runtime.local_engine import LocalEngine, Output
from pigou.runtime.memory_report import tensor_bytes
from pigou.runtime.models.load import LoadedModel, load
from pigou.runtime.models.transformers_decoder import (
    TransformersDecoder,
)
from pigou.text.tokenizer import TokenizerError
from pigou.worker.config import WorkerConfig
from pigou.worker.startup.build import build

DOCS = Path(__file__).parents[2] / "docs/guide/model-families.md"
#: Families of the engine's paths: windows and caps, sinks, experts, latents, learned positions.
SAMPLE = ("gemma2", "gpt_oss", "qwen3_moe", "deepseek_v3", "opt")
#: Largest error, relative to the largest logit.
LIMIT = 1e-5


@pytest.fixture(scope="session", autouse=True)
def _quiet() -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, LoadedModel]]:
    """Return a family's model, as transformers and as Pigou load it."""

    @cache
    def find(kind: str) -> tuple[Any, LoadedModel]:
        folder = tmp_path_factory.mktemp(kind)
        reference = write_family(folder, kind)
        return reference, load(folder, "fp32", implementation="transformers")

    return find


Find = Callable[[str], tuple[Any, LoadedModel]]


def plan_of(*spans: tuple[int, int, int]) -> Plan:
    """Entries (row, start, count)."""
    rows, starts, counts = (np.array(column, dtype=np.int32) for column in zip(*spans, strict=True))
    return Plan(rows=rows, starts=starts, counts=counts, kv_lens=starts.copy(),
                samples=np.ones(len(rows), dtype=np.bool_))  # fmt: skip


@pytest.mark.parametrize(
    "kind",
    [*SAMPLE, *(pytest.param(each, marks=pytest.mark.slow) for each in FAMILIES
                if each not in SAMPLE)],
)  # fmt: skip
def test_logits_of_chunks_and_of_moved_blocks_are_those_of_transformers(
    kind: str, family: Find
) -> None:
    reference, model = family(kind)
    tokens = np.random.default_rng(3).integers(3, VOCAB, (2, 40), dtype=np.int32)
    with torch.inference_mode():
        expected: Tensor = reference(torch.from_numpy(tokens).long()).logits
    tables: Ints = np.random.default_rng(1).permutation(16).astype(np.int32).reshape(4, 4)
    caches = [model.cache(16, 16) for _ in range(2)]
    parts: list[list[Tensor]] = [[], []]
    for at, spans in enumerate((
        [(0, 0, 17)],
        [(0, 17, 13), (1, 0, 9)],
        [(0, 30, 1), (1, 9, 1)],
        [(1, 10, 1), (0, 31, 9)],
        [(1, 11, 29)],
    )):  # fmt: skip
        if at == 2:  # a transfer: other blocks of another worker
            tables, there = np.roll(tables, 5), tables
            caches[1].write(tables.ravel(), caches[0].read(there.ravel()))
        attention = model.attention(caches[at >= 2], tables, 64)
        rows = [(row + 1, start, count) for row, start, count in spans]
        own = [tokens[row, start : start + count] for row, start, count in spans]
        batch = make_batch(plan_of(*rows), own, model.device)
        attention.begin(batch)
        with torch.inference_mode():
            logits = model.decoder.logits(model.decoder.hidden(batch.tokens, attention, None))
        for entry, (row, _, count) in enumerate(spans):
            last = int(batch.last[entry])
            parts[row].append(logits[last - count + 1 : last + 1])
    error = max(float((torch.cat(parts[row]) - expected[row]).abs().max()) for row in range(2))
    assert error <= LIMIT * float(expected.abs().max())


def greedy(engine: LocalEngine, prompts: list[Ints], count: int = 12) -> list[Output]:
    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    outputs = engine.generate(prompts, params)
    engine.core.check_integrity()
    return outputs


def check_greedy(reference: Any, prompts: list[Ints], outputs: list[Output]) -> None:
    """Each token is transformers' best, or within rounding of it."""
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([[*prompt, *output.tokens]])
        with torch.inference_mode():
            logits = reference(ids).logits[0, len(prompt) - 1 : -1]
        best = logits.max(-1).values - logits[range(len(output.tokens)), output.tokens]
        assert float(best.max()) <= LIMIT * float(logits.abs().max())


@pytest.mark.parametrize("kind", SAMPLE)
def test_greedy_tokens_are_those_of_transformers_however_they_are_cut(
    kind: str, family: Find
) -> None:
    reference, model = family(kind)
    rng = np.random.default_rng(5)
    prompts = [rng.integers(3, VOCAB, size=n) for n in (3, 40, 17, 33, 1, 25)]

    def engine(**limits: Any) -> LocalEngine:
        limits = {"blocks": 200, "max_model_len": 96, "max_batched_tokens": 24, **limits}
        return LocalEngine(model, EngineConfig(**limits))

    first = engine(max_repeat=4)
    check_greedy(reference, prompts, greedy(first, prompts))
    again = greedy(first, prompts)
    assert sum(output.cached for output in again) > 0
    check_greedy(reference, prompts, again)
    for host_blocks in (0, 40):
        tight = engine(blocks=8, host_blocks=host_blocks)
        if host_blocks:
            tight.core.rates = Rates(prefill=1.0, swap=1e12, block_bytes=1)
        outputs = greedy(tight, prompts, 30)
        assert sum(output.preemptions for output in outputs) > 0
        assert (tight.core.stats.swaps > 0) == bool(host_blocks)
        check_greedy(reference, prompts, outputs)


@pytest.mark.parametrize(
    ("kind", "changes", "told"),
    [
        ("mamba", {}, "keeps a state besides KV"),
        ("jamba", {}, "keeps a state besides KV"),
        ("falcon_h1", {}, "keeps a state besides KV"),
        ("qwen3_next", {}, "keeps a state besides KV"),
        ("lfm2", {"layer_types": ["conv", "full_attention"] * 2}, "2 of its 4 layers have no"),
        ("bert", {}, "is not causal"),
        ("t5", {}, "is an encoder-decoder"),
        ("bart", {"is_encoder_decoder": False}, "counts positions by itself"),
        ("roberta", {"is_decoder": True}, "counts positions by itself"),
        ("vit", {}, "is no decoder that generates text"),
        ("bloom", {}, "not called through transformers' interface"),
        ("mpt", {}, "not called through transformers' interface"),
        ("diffllama", {}, "computes attention more than once"),
        ("doge", {}, "does more than causal attention"),
    ],
)
def test_what_the_seam_does_not_reach_is_refused_before_weights_are_read(
    kind: str, changes: dict[str, Any], told: str, tmp_path: Path
) -> None:
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **changes})
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=told):
        load(tmp_path, implementation="transformers")


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t: t.pop("model.layers.1.self_attn.q_proj.weight"),
         "'model.layers.1.self_attn.q_proj.weight' is missing"),
        (lambda t: t.update({"model.layers.9.x": torch.zeros(2)}),
         "'model.layers.9.x' is unexpected"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(3)}),
         r"'model.norm.weight' has shape \(3,\), not \(64,\)"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_named(
    change: Callable[[dict[str, Tensor]], None], told: str, tmp_path: Path
) -> None:
    write_family(tmp_path, "glm4")
    rewrite(tmp_path, change)
    with pytest.raises(ModelError, match=told):
        load(tmp_path, "fp32")


@pytest.mark.parametrize(
    ("kind", "text", "vision", "tied"),
    [
        ("Gemma3", {"query_pre_attn_scalar": 16, "sliding_window": 8}, {}, True),
        ("Llava", {"model_type": "llama"}, {"model_type": "clip_vision_model"}, False),
        ("Mistral3", {"model_type": "mistral", "sliding_window": None},
         {"model_type": "pixtral", "head_dim": 16}, True),
    ],
)  # fmt: skip
def test_the_text_part_of_a_vision_language_checkpoint_is_served(
    kind: str, text: dict[str, Any], vision: dict[str, Any], tied: bool, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
             "num_attention_heads": 2, "image_size": 16, "patch_size": 8}  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(
        text_config={**SIZES, **text}, vision_config={**sizes, **vision}, image_token_index=299,
        tie_word_embeddings=tied,
    )  # fmt: skip
    whole = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    whole.save_pretrained(tmp_path)
    model = load(tmp_path, "fp32", implementation="transformers")
    prompt = np.random.default_rng(2).integers(3, 290, size=30)
    engine = LocalEngine(model, EngineConfig(blocks=20, max_model_len=96))
    check_greedy(whole, [prompt], greedy(engine, [prompt]))


def test_masks_of_old_checkpoints_are_skipped(tmp_path: Path) -> None:
    write_family(tmp_path, "gpt2")
    rewrite(tmp_path, lambda t: t.update({
        "transformer.h.0.attn.bias": torch.ones(1, 1, 8, 8),
        "transformer.h.0.attn.masked_bias": torch.tensor(-1e4),
    }))  # fmt: skip
    load(tmp_path, "fp32")


def test_auto_prefers_the_own_implementation_and_pigou_refuses_others(
    family: Find, tmp_path: Path
) -> None:
    write_family(tmp_path, "llama")
    assert not isinstance(load(tmp_path).decoder, TransformersDecoder)
    assert load(tmp_path).digest != load(tmp_path, implementation="transformers").digest
    other = family("glm4")[1]
    assert isinstance(load(other.folder).decoder, TransformersDecoder)
    with pytest.raises(ModelError, match="glm4"):
        load(other.folder, implementation="pigou")


def test_products_can_be_wrapped_by_name(family: Find) -> None:
    folder = family("glm4")[1].folder
    decoder = load(folder, "fp32").decoder
    assert isinstance(decoder, TransformersDecoder)
    products = decoder.linears()
    assert {"model.layers.3.self_attn.q_proj", "model.layers.0.mlp.down_proj", "lm_head"} <= {
        *products
    }
    seen: list[int] = []
    inner = products["lm_head"].product
    products["lm_head"].product = lambda x: seen.append(len(x)) or inner(x)  # type: ignore[func-returns-value]
    decoder.logits(torch.zeros(3, 64))
    assert seen == [3]


def test_the_guide_lists_what_is_compared() -> None:
    lines = DOCS.read_text().split("## Families")[1].split("## ")[0].splitlines()
    listed = {name for line in lines if line.startswith("| ") for name in line.split("`")[1::2]}
    assert listed == set(FAMILIES)


@pytest.mark.parametrize("length", [20, 60])
def test_longrope_goes_by_the_engines_length_not_by_the_batch(length: int, tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [1.0 + i for i in range(8)]}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    changes = {"rope_parameters": {**rope, "original_max_position_embeddings": 40},
               "original_max_position_embeddings": 40, "sliding_window": None}  # fmt: skip
    reference = write_family(tmp_path, "phi3", **changes)
    model = load(tmp_path, "fp32", implementation="transformers")
    prompts = [np.random.default_rng(n).integers(3, VOCAB, size=n) for n in (length - 13, 7)]
    engine = LocalEngine(model, EngineConfig(blocks=40, max_model_len=length))
    outputs = greedy(engine, prompts)
    check_greedy(reference, prompts[:1], outputs[:1])
    alone = LocalEngine(model, EngineConfig(blocks=40, max_model_len=length))
    assert greedy(alone, prompts[1:])[0].tokens == outputs[1].tokens


@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3"])
def test_latent_attention_stores_a_latent_and_a_rotated_key_per_token(
    kind: str, family: Find
) -> None:
    layout = family(kind)[1].layout(16)
    assert (layout.parts, layout.kv_heads, layout.head_dim) == (1, 1, 32 + 16)
    assert layout.block_bytes == 4 * 16 * (32 + 16) * 4  # layers, tokens, numbers, fp32


def test_experts_are_ours_and_count_their_tokens(family: Find) -> None:
    for kind in ("gpt_oss", "deepseek_v3", "qwen3_moe", "granitemoe"):
        _, model = family(kind)
        loads = model.decoder.loads
        assert loads is not None, kind
        before = loads.totals.sum(1)
        engine = LocalEngine(model, EngineConfig(blocks=32, max_model_len=64))
        greedy(engine, [np.arange(5, 15, dtype=np.int32)], 4)
        top = 2  # each layer sees 10 prompt tokens and 3 of the sampled ones, and the warm-ups'
        assert (loads.totals.sum(1) - before >= top * 13).all()
        assert loads.steps > 0


def test_mxfp4_experts_are_dequantised_once_at_load(tmp_path: Path) -> None:
    reference = write_family(tmp_path, "gpt_oss")
    tensors = load_file(tmp_path / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    for name, weight in reference.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = weight.shape
            shape = (experts, outputs, inputs // 32)
            blocks = torch.randint(0, 256, (*shape, 16), generator=generator).to(torch.uint8)
            scales = torch.randint(121, 125, shape, generator=generator).to(torch.uint8)
            weight.data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            del tensors[name]
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load(tmp_path, "fp32")
    prompts = [np.arange(5, 25, dtype=np.int32)]
    outputs = greedy(LocalEngine(model, EngineConfig(blocks=32, max_model_len=64)), prompts)
    check_greedy(reference, prompts, outputs)


def test_a_worker_serves_a_family_whose_shapes_are_not_described(tmp_path: Path) -> None:
    vocab = json.loads((bundled_path() / "config.json").read_text())["vocab_size"]
    write_family(tmp_path, "helium", vocab_size=vocab)
    with pytest.raises(TokenizerError, match="tokenizer"):
        build(WorkerConfig(model=str(tmp_path), blocks=16, kv_transfer="none"))
    shutil.copy(bundled_path() / "tokenizer.json", tmp_path)
    parts = build(WorkerConfig(model=str(tmp_path), blocks=16, kv_transfer="none"))
    assert parts.work is None
    assert parts.model.template is None
    model = load(tmp_path, "fp32")
    LocalEngine(model, EngineConfig(blocks=64, max_model_len=64))
    stored = (tmp_path / "model.safetensors").stat().st_size
    assert tensor_bytes(model.decoder) == pytest.approx(stored, rel=0.05)


def test_token_eviction_is_that_of_the_own_decoder_or_refused_by_name(
    family: Find, tmp_path: Path
) -> None:
    write_family(tmp_path, "qwen3")
    eviction = EvictionConfig(policy="pigou", recent=8, least=16, interval=16)
    config = EngineConfig(blocks=24, max_model_len=128, eviction=eviction)
    prompts = [np.random.default_rng(n).integers(3, VOCAB, size=n) for n in (60, 44, 51, 38)]
    outputs = []
    for implementation in ("pigou", "transformers"):
        engine = LocalEngine(load(tmp_path, "fp32", implementation=implementation), config)
        outputs.append([output.tokens for output in greedy(engine, prompts, 60)])
        assert engine.core.stats.evicted_tokens > 0
    assert outputs[0] == outputs[1]
    for kind, reason in (
        ("gemma2", "windows"),
        ("opt", "does not rotate"),
        ("glm4", "another way"),
    ):
        with pytest.raises(ModelError, match=reason):
            LocalEngine(family(kind)[1], config)
