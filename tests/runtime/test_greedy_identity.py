"""Greedy tokens in fp32 are those of transformers, however the work is cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import BUNDLED, FAMILIES, MODELS, VOCAB, make_config, write_checkpoint
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.lib.examples import examples
from torch import Tensor

from pigou.config import EngineConfig
from pigou.engine.plan import Rates
from pigou.request import SamplingParams
from pigou.runtime.local_engine import LocalEngine, Output
from pigou.runtime.models.load import LoadedModel, load
from pigou.runtime.step_output import RankedLogprobs
from reference import Prompt, Reference, bundled_prompts, make_prompts, report

LENGTH = 128
Find = Callable[[str], LoadedModel]
FindReference = Callable[[str], Reference]


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)


def make_engine(model: LoadedModel, **changes: int) -> LocalEngine:
    return LocalEngine(
        model, EngineConfig(**{"blocks": 600, "max_model_len": LENGTH, "max_seqs": 64, **changes})
    )


def run(engine: LocalEngine, prompts: list[Prompt], tokens: int = 16) -> list[Output]:
    outputs = engine.generate(prompts, greedy(tokens))
    engine.core.check_integrity()
    assert all(len(output.tokens) == tokens for output in outputs)
    return outputs


@pytest.mark.parametrize("count", [30, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", MODELS)
def test_prompts_of_each_model_agree_with_transformers(
    model: str, count: int, loaded: Find, reference: FindReference
) -> None:
    prompts, engine, tokens = prepare(loaded(model), model == BUNDLED, count)
    outputs = [output.tokens for output in run(engine, prompts, tokens)]
    excused = reference(model).check(prompts, outputs)
    report(
        f"{model}: {len(prompts)} prompts of {min(map(len, prompts))} to {max(map(len, prompts))} "
        f"tokens, {sum(map(len, outputs)):,} tokens in fp32, 0 divergences, {excused} excused"
    )


def prepare(model: LoadedModel, bundled: bool, count: int) -> tuple[list[Prompt], LocalEngine, int]:
    """Return prompts, an engine that cuts them into chunks, and how many tokens to ask for."""
    if bundled:
        limits = {"blocks": 2400, "max_model_len": 512, "max_batched_tokens": 256}
        return bundled_prompts(count, 440), make_engine(model, **limits), 32
    prompts = make_prompts(count, VOCAB, 110, seed=5)
    return prompts, make_engine(model, max_batched_tokens=100), 16


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("block_size", [4, 16, 32])
def test_tokens_do_not_depend_on_the_block_size(
    family: str, block_size: int, loaded: Find, reference: FindReference
) -> None:
    prompts = make_prompts(6, VOCAB, 60)
    engine = make_engine(loaded(family), block_size=block_size, max_batched_tokens=48)
    reference(family).check(prompts, [o.tokens for o in run(engine, prompts)])


@pytest.mark.parametrize("chunk", [*range(1, 18), 31, 32, 33, 64])
def test_tokens_do_not_depend_on_the_chunk_size(
    chunk: int, loaded: Find, reference: FindReference
) -> None:
    prompts = make_prompts(3, VOCAB, 60)
    engine = make_engine(loaded("qwen3"), max_batched_tokens=chunk, max_seqs=min(chunk, 64))
    reference("qwen3").check(prompts, [o.tokens for o in run(engine, prompts, 8)])


@pytest.mark.parametrize("repeat", [1, 3, 16])
@pytest.mark.parametrize("batch", [1, 64])
def test_tokens_depend_neither_on_the_batch_nor_on_repeat(
    batch: int, repeat: int, loaded: Find, reference: FindReference
) -> None:
    prompts = make_prompts(64 if batch == 64 else 8, VOCAB, 40)
    engine = make_engine(loaded("qwen2"), max_seqs=batch, max_repeat=repeat)
    reference("qwen2").check(prompts, [o.tokens for o in run(engine, prompts, 10)])


def test_tokens_after_a_prefix_hit_are_the_same(loaded: Find, reference: FindReference) -> None:
    prompts = make_prompts(8, VOCAB, 70)
    engine = make_engine(loaded("llama"))
    run(engine, prompts)
    again = run(engine, prompts)
    reference("llama").check(prompts, [o.tokens for o in again])
    assert sum(o.cached for o in again) > 0


@pytest.mark.parametrize("swap", [False, True], ids=["recompute", "swap"])
@pytest.mark.parametrize("repeat", [1, 4])
def test_tokens_after_a_preemption_are_the_same(
    swap: bool, repeat: int, loaded: Find, reference: FindReference
) -> None:
    prompts = make_prompts(12, VOCAB, 40)
    engine = make_engine(
        loaded("mistral"), blocks=14, host_blocks=64 if swap else 0, max_repeat=repeat
    )
    if swap:
        engine.core.rates = Rates(prefill=1.0, swap=1e12, block_bytes=1)
    outputs = run(engine, prompts, 40)
    reference("mistral").check(prompts, [o.tokens for o in outputs])
    assert sum(o.preemptions for o in outputs) > 0
    assert (engine.core.stats.swaps > 0) == swap


@settings(max_examples=examples(25), suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_mix_of_limits_gives_the_same_tokens(
    data: st.DataObject, loaded: Find, reference: FindReference
) -> None:
    family = data.draw(st.sampled_from(FAMILIES))
    seqs = data.draw(st.sampled_from([1, 3, 16]))
    engine = make_engine(
        loaded(family),
        block_size=data.draw(st.sampled_from([4, 16])),
        blocks=data.draw(st.sampled_from([24, 40, 300])),
        host_blocks=data.draw(st.sampled_from([0, 50])),
        max_seqs=seqs,
        max_batched_tokens=data.draw(st.integers(seqs, 80)),
        max_repeat=data.draw(st.sampled_from([1, 5])),
    )
    if data.draw(st.booleans()):
        engine.core.rates = Rates(prefill=1.0, swap=1e12, block_bytes=1)
    common = make_prompts(1, VOCAB, 40, seed=7)[0]
    prompts = []
    for own in make_prompts(data.draw(st.integers(1, 8)), VOCAB, 30, data.draw(st.integers(0, 9))):
        shared = common[: data.draw(st.integers(0, len(common)))]
        prompts.append(torch.cat((torch.tensor(shared), torch.tensor(own))).numpy())
    outputs = run(engine, prompts, 12)
    reference(family).check(prompts, [o.tokens for o in outputs])


@pytest.mark.parametrize("model", MODELS)
def test_bf16_is_no_farther_from_fp32_than_that_of_transformers(
    model: str, folder: Callable[[str], Path], reference: FindReference
) -> None:
    prompts = bundled_prompts(12, 60) if model == BUNDLED else make_prompts(12, VOCAB, 60)
    ours = load(folder(model), "bf16")
    size = ours.config.vocab
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=size, logprobs=size)
    outputs = make_engine(ours).generate(prompts, params)
    exact = [reference(model).logits(prompt).log_softmax(-1) for prompt in prompts]
    peer = Reference(folder(model), torch.bfloat16)
    theirs = distance([peer.logits(prompt).log_softmax(-1) for prompt in prompts], exact)
    found = [spread_out([*o.prompt_logprobs[1:], o.logprobs[0]], size) for o in outputs]
    report(
        f"{model}: bf16 logprobs differ from fp32 by {distance(found, exact):.4f} (root mean "
        f"square), those of transformers by {theirs:.4f}"
    )
    assert distance(found, exact) < 1.1 * theirs


def spread_out(reports: list[RankedLogprobs | None], vocab: int) -> Tensor:
    """Reports of all tokens, as a matrix in the order of the vocabulary."""
    rows = torch.empty(len(reports), vocab)
    for row, found in zip(rows, reports, strict=True):
        assert found is not None
        row[torch.from_numpy(found.top)] = torch.from_numpy(found.logprobs)
    return rows


def distance(some: list[Tensor], others: list[Tensor]) -> float:
    """Root of the mean square difference."""
    return float((torch.cat(some) - torch.cat(others)).square().mean().sqrt())


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("qwen3", {"attention_bias": True, "num_key_value_heads": 4}),
        ("mistral", {"num_attention_heads": 12, "num_key_value_heads": 1, "head_dim": 16}),
        ("qwen2", {"num_attention_heads": 14, "num_key_value_heads": 2, "hidden_size": 112}),
        ("llama", {"head_dim": 80, "num_key_value_heads": 1}),
    ],
    ids=["biases", "no-groups", "group-of-12", "group-of-7", "head-of-80"],
)
def test_switches_of_a_family_agree_with_transformers(
    family: str, changes: dict[str, int], tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path, make_config(family, **changes))
    prompts = make_prompts(6, VOCAB, 60)
    engine = make_engine(load(folder), max_batched_tokens=40)
    Reference(folder).check(prompts, [o.tokens for o in run(engine, prompts)])


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_a_gpu_gives_the_same_tokens(
    family: str, folder: Callable[[str], Path], reference: FindReference
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.backends.cuda.matmul.allow_tf32 = False
    engine = make_engine(load(folder(family), "fp32", "cuda"), max_batched_tokens=48)
    prompts = make_prompts(16, VOCAB, 70)
    reference(family).check(prompts, [o.tokens for o in run(engine, prompts)])
