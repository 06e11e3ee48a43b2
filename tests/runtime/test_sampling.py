"""Laws of sampling: distribution, keys, truncation, penalties, ends."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from checkpoints import VOCAB
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lib.examples import examples
from torch import Tensor

from pigou.config import EngineConfig
from pigou.request import SamplingParams
from pigou.runtime.local_engine import LocalEngine
from pigou.runtime.models.load import LoadedModel
from pigou.runtime.ops import KernelOps
from pigou.runtime.sampling import Sampler, choose, cut_min_p, cut_top_k, cut_top_p, uniform
from pigou.runtime.sequence import TokenSequence, make_sequence
from reference import Reference, make_prompts

CPU = torch.device("cpu")
Find = Callable[[str], LoadedModel]


def make(params: SamplingParams, tokens: list[int], resume: int = 0) -> TokenSequence:
    return make_sequence(
        "r",
        tokens,
        params,
        seed=b"",
        resume=resume,
        end_tokens=frozenset({2}),
        block_size=16,
    )


def draw(params: list[SamplingParams], logits: Tensor, tokens: list[list[int]]) -> list[int]:
    rows = [make(p, t) for p, t in zip(params, tokens, strict=True)]
    chosen: list[int] = Sampler(rows, KernelOps(), CPU)(logits.clone())[0].tolist()
    return chosen


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """Standardized chi-square: about normal with mean 0 and deviation 1 for many cells."""
    cells = expected > 5
    statistic = ((counts[cells] - expected[cells]) ** 2 / expected[cells]).sum()
    freedom = cells.sum() - 1
    return float((statistic - freedom) / np.sqrt(2 * freedom))


@pytest.mark.parametrize(
    "changes",
    [{}, {"temperature": 0.5}, {"top_k": 10}, {"top_p": 0.7}, {"min_p": 0.05}],
    ids=lambda c: "-".join(c) or "plain",
)
def test_draws_follow_the_exact_distribution(changes: dict[str, float]) -> None:
    logits = torch.randn(64, generator=torch.Generator().manual_seed(1)) * 2
    count = 20_000
    params = [
        SamplingParams(**{"max_tokens": 1, "temperature": 1.0, "seed": seed, **changes})
        for seed in range(count)
    ]
    got = draw(params, logits.expand(count, -1), [[1, 2, 3]] * count)
    exact = naive(logits.double().numpy(), params[0])
    counts = np.bincount(got, minlength=64)
    assert counts[exact == 0].sum() == 0
    assert abs(chi_square(counts, exact * count)) < 4


def test_draws_at_different_positions_are_independent() -> None:
    numbers = np.array([uniform(5, position) for position in range(40_000)])
    cells = np.bincount((numbers[:-1] * 8).astype(int) * 8 + (numbers[1:] * 8).astype(int))
    assert abs(chi_square(cells, np.full(64, len(numbers) / 64))) < 4


def test_a_row_draws_the_same_token_beside_any_others() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(16, VOCAB, generator=generator)
    kinds: list[dict[str, float]] = [{}, {"top_k": 5}, {"top_p": 0.5}, {"temperature": 0.0}]
    params = [
        SamplingParams(**{"max_tokens": 9, "temperature": 0.8, "seed": i, **kinds[i % 4]})
        for i in range(16)
    ]
    tokens = [list(range(3, 5 + i)) for i in range(16)]
    together = draw(params, logits, tokens)
    alone = [draw([params[i]], logits[i : i + 1], [tokens[i]])[0] for i in range(16)]
    assert together == alone


@pytest.mark.parametrize("cut", [1, 7, 19])
def test_a_continued_sequence_draws_the_same_tokens(cut: int, loaded: Find) -> None:
    engine = LocalEngine(loaded("llama"), EngineConfig(blocks=200, max_model_len=128))
    params = {
        "temperature": 0.9,
        "seed": 11,
        "frequency_penalty": 0.4,
        "top_p": 0.95,
        "ignore_eos": True,
    }
    prompts = make_prompts(4, VOCAB, 40)
    whole = engine.generate(prompts, SamplingParams(max_tokens=20, **params))
    for prompt, output in zip(prompts, whole, strict=True):
        begun = [*prompt.tolist(), *output.tokens[:cut]]
        rest = engine.add(begun, SamplingParams(max_tokens=20 - cut, **params), resume=cut)
        while rest.reason is None:
            engine.step()
        assert output.tokens[:cut] + rest.tokens == output.tokens


def naive(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Probabilities by the definitions, one token at a time."""
    order = np.argsort(-logits, kind="stable")
    weights = np.exp((logits - logits.max()) / params.temperature)
    weights[weights < params.min_p] = 0
    if params.top_k:
        least = weights[order[min(params.top_k, len(logits)) - 1]]
        weights[weights < least] = 0
    probabilities = weights / weights.sum()
    total, kept = 0.0, np.zeros(len(logits), dtype=bool)
    for token in order:
        kept[token] = True
        total += probabilities[token]
        if total >= params.top_p:
            break
    probabilities[probabilities < probabilities[kept].min()] = 0
    return probabilities / probabilities.sum()


@settings(max_examples=examples(150))
@given(
    seed=st.integers(0, 10_000),
    vocab=st.sampled_from([5, 64, 1500]),
    top_k=st.sampled_from([0, 1, 3, 50, 5000]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
)
def test_cuts_keep_what_their_definitions_keep(
    seed: int, vocab: int, top_k: int, top_p: float, min_p: float
) -> None:
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(seed))
    cut = logits.clone()
    cut_min_p(cut, torch.tensor([min_p] * 3))
    cut_top_k(cut, torch.tensor([top_k] * 3), max(1, top_k))
    cut_top_p(cut, torch.tensor([top_p] * 3, dtype=torch.float64))
    params = SamplingParams(max_tokens=1, top_k=top_k, top_p=top_p, min_p=min_p)
    for row, plain in zip(cut, logits.double().numpy(), strict=True):
        want = naive(plain, params) > 0
        assert (torch.isfinite(row).numpy() == want).mean() > 1 - 2 / vocab, "beyond rounding"


def test_a_token_of_probability_zero_is_never_chosen() -> None:
    probabilities = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]]).expand(5, -1)
    uniforms = torch.tensor([0.0, 0.25, 0.5, 0.75, 1 - 2**-52], dtype=torch.float64)
    assert choose(probabilities, uniforms).tolist() == [1, 1, 3, 3, 3]


@settings(max_examples=examples(80))
@given(data=st.data())
def test_penalties_and_bias_follow_their_formulas(data: st.DataObject) -> None:
    prompt = data.draw(st.lists(st.integers(0, 19), min_size=1, max_size=10))
    output = data.draw(st.lists(st.integers(0, 19), max_size=10))
    number = st.sampled_from([0.0, 0.5, 1.5, -1.0])
    params = SamplingParams(
        max_tokens=20,
        temperature=0.0,
        presence_penalty=data.draw(number),
        frequency_penalty=data.draw(number),
        repetition_penalty=data.draw(st.sampled_from([1.0, 1.3, 0.7])),
        logit_bias=data.draw(st.dictionaries(st.integers(0, 19), st.floats(-5, 5), max_size=3)),
    )
    logits = torch.randn(
        1, 20, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 9)))
    )
    want = logits[0].double().tolist()
    for token in range(20):
        if token in prompt + output:
            r = params.repetition_penalty
            want[token] = want[token] / r if want[token] > 0 else want[token] * r
        count = output.count(token)
        want[token] -= count * params.frequency_penalty + (count > 0) * params.presence_penalty
        want[token] += params.logit_bias.get(token, 0.0)
    row = make(params, prompt + output, resume=len(output))
    chosen = int(Sampler([row], KernelOps(), CPU)(logits)[0])
    assert want[chosen] >= max(want) - 1e-5


def test_no_end_token_comes_before_min_tokens(loaded: Find) -> None:
    engine = LocalEngine(loaded("llama"), EngineConfig(blocks=100, max_model_len=128))
    end_tokens = frozenset(range(0, VOCAB, 3))
    params = SamplingParams(max_tokens=30, min_tokens=12, seed=3, stop_token_ids=end_tokens)
    for output in engine.generate(make_prompts(6, VOCAB, 20), params):
        assert not end_tokens & set(output.tokens[:12])
        assert 13 <= len(output.tokens) < 30
        assert output.tokens[-1] in end_tokens | {2}
        assert output.reason == "stop"


def test_the_end_token_ends_unless_it_is_ignored(loaded: Find) -> None:
    engine = LocalEngine(loaded("llama"), EngineConfig(blocks=100, max_model_len=128))
    pushed = {"max_tokens": 5, "temperature": 0.0, "logit_bias": {2: 1000.0}}
    assert engine.generate([[5]], SamplingParams(**pushed))[0].tokens == [2]
    ignored = engine.generate([[5]], SamplingParams(**pushed, ignore_eos=True))[0]
    assert ignored.tokens == [2] * 5
    assert ignored.reason == "length"


def test_logprobs_are_those_of_the_reference(
    loaded: Find, reference: Callable[[str], Reference]
) -> None:
    engine = LocalEngine(
        loaded("qwen2"), EngineConfig(blocks=100, max_model_len=128, max_batched_tokens=17)
    )
    prompts = make_prompts(4, VOCAB, 50)
    params = SamplingParams(
        max_tokens=6, temperature=0.7, top_k=20, logprobs=3, prompt_logprobs=2, ignore_eos=True
    )
    for prompt, output in zip(prompts, engine.generate(prompts, params), strict=True):
        exact = reference("qwen2").logits([*prompt, *output.tokens]).log_softmax(-1)
        reports = [*output.prompt_logprobs, *output.logprobs]
        assert reports[0] is None
        tokens = [*prompt.tolist(), *output.tokens]
        assert len(reports) == len(tokens)
        for at, report in enumerate(reports[1:], start=1):
            row = exact[at - 1]
            assert report is not None
            assert report.token == tokens[at]
            assert report.logprob == pytest.approx(float(row[report.token]), abs=1e-3)
            assert abs(report.rank - 1 - int((row > row[report.token]).sum())) <= 1
            assert len(report.top) == (2 if at < len(prompt) else 3)
            best = row.topk(len(report.top)).values
            assert report.logprobs == pytest.approx(best.numpy(), abs=1e-3)
