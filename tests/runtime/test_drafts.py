"""With drafts, right or wrong, tokens are those of a run without."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from checkpoints import BUNDLED, FAMILIES, VOCAB
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.lib.examples import examples

from pigou.config import ConfigError, EngineConfig, SpeculativeConfig, read_speculation
from pigou.engine.plan import Rates
from pigou.models import ModelError
from pigou.request import FinishReason, Grammar, Ints, SamplingParams
from pigou.runtime.executor import Proposer
from pigou.runtime.local_engine import LocalEngine, Output
from pigou.runtime.models.load import LoadedModel
from pigou.runtime.sequence import TokenSequence
from pigou.runtime.speculation import DraftModel, NgramProposer, look_up, make_proposer
from reference import Prompt, bundled_prompts, make_prompts

Find = Callable[[str], LoadedModel]
NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=4, prompt_lookup_min=1)


class Scripted:
    """Proposes what a run without drafts generated, with wrong tokens in between."""

    def __init__(self, texts: list[list[int]], wrong: float, seed: int) -> None:
        self._texts, self._wrong, self._random = texts, wrong, random.Random(seed)

    def offers(self, sequences: list[TokenSequence]) -> list[int]:
        """Offer some drafts for each sequence."""
        return [self._random.randint(0, 5) for _ in sequences]

    def propose(self, sequences: list[TokenSequence], counts: list[int]) -> list[Ints]:
        """Return the tokens to come, some changed."""
        return [self._next(s, k) for s, k in zip(sequences, counts, strict=True)]

    def drop(self, request: str) -> None:
        """Keep nothing of a request."""

    def _next(self, sequence: TokenSequence, count: int) -> Ints:
        known = sequence.buffer[: sequence.length].tolist()
        text = next((t for t in self._texts if t[: len(known)] == known), known)
        drafts = (text[len(known) :] + [0] * count)[:count]
        return np.array([1 if self._random.random() < self._wrong else d for d in drafts], np.int32)


def run(
    model: LoadedModel, prompts: list[Prompt], params: list[SamplingParams],
    proposer: Proposer | None = None, rates: Rates | None = None, **limits: int,
) -> tuple[list[Output], LocalEngine]:  # fmt: skip
    limits = {"blocks": 400, "max_model_len": 128, "max_seqs": 8, **limits}
    config = EngineConfig(**limits, num_speculative_tokens=5 if proposer is not None else 0)
    engine = LocalEngine(model, config, proposer=proposer)
    if engine.core.drafts is not None:  # whatever they cost
        engine.core.drafts.choose = lambda _, offers: np.minimum(offers, 5)  # type: ignore[method-assign]
    engine.core.rates = rates
    outputs = engine.generate(prompts, params)
    engine.core.check_integrity()
    assert engine.core.free_blocks == config.blocks
    return outputs, engine


def same(ours: list[Output], theirs: list[Output]) -> None:
    """Compare tokens, reasons and log probabilities."""
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.tokens == other.tokens
        assert mine.reason == other.reason
        assert [r.token for r in mine.logprobs] == [r.token for r in other.logprobs]
        for one, two in zip(mine.logprobs, other.logprobs, strict=True):
            assert one.logprob == pytest.approx(two.logprob, abs=1e-4)
            assert one.top.tolist() == two.top.tolist()


@st.composite
def sampling(draw: st.DrawFn) -> SamplingParams:
    greedy = draw(st.booleans())
    return SamplingParams(
        max_tokens=draw(st.sampled_from([1, 2, 20, 33])),
        min_tokens=draw(st.sampled_from([0, 0, 12])),
        temperature=0.0 if greedy else draw(st.sampled_from([0.3, 1.0])),
        top_p=draw(st.sampled_from([1.0, 0.8])),
        top_k=draw(st.sampled_from([0, 5])),
        seed=draw(st.integers(0, 9)),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.7])),
        logit_bias=draw(st.sampled_from([{}, {}, {3: 4.0}])),
        stop_token_ids=frozenset(draw(st.sets(st.integers(0, VOCAB - 1), max_size=40))),
        logprobs=draw(st.sampled_from([None, 2])),
    )


@settings(max_examples=examples(25), suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_drafts_leave_tokens_and_logprobs_as_they_are(
    data: st.DataObject, loaded: Find
) -> None:
    model = loaded(data.draw(st.sampled_from(FAMILIES)))
    count = data.draw(st.integers(1, 6))
    prompts = make_prompts(count, VOCAB, 40, data.draw(st.integers(0, 9)))
    params = [data.draw(sampling()) for _ in prompts]
    plain, _ = run(model, prompts, params)
    texts = [list(p) + o.tokens for p, o in zip(prompts, plain, strict=True)]
    wrong = data.draw(st.sampled_from([0.0, 0.3, 1.0]))
    scripted = Scripted(texts, wrong, data.draw(st.integers(0, 9)))
    ours, _ = run(
        model, prompts, params,
        data.draw(st.sampled_from([scripted, scripted, NgramProposer(NGRAM)])),
        data.draw(st.sampled_from([None, Rates(prefill=1.0, swap=1e12, block_bytes=1)])),
        blocks=data.draw(st.sampled_from([20, 30, 400])),
        block_size=data.draw(st.sampled_from([4, 16])),
        host_blocks=data.draw(st.sampled_from([0, 50])),
        max_batched_tokens=data.draw(st.integers(8, 40)),
        max_repeat=data.draw(st.sampled_from([1, 5])),
    )  # fmt: skip
    same(ours, plain)


def test_right_drafts_save_steps(loaded: Find) -> None:
    prompts = make_prompts(2, VOCAB, 30)
    params = [SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)] * 2
    plain, _ = run(loaded("llama"), prompts, params)
    texts = [list(p) + o.tokens for p, o in zip(prompts, plain, strict=True)]
    ours, engine = run(loaded("llama"), prompts, params, Scripted(texts, 0.0, 0))
    same(ours, plain)
    pricer = engine.core.drafts
    assert pricer is not None
    assert pricer.accepted_tokens == pricer.draft_tokens > 50
    again, _ = run(loaded("llama"), prompts, params, Scripted(texts, 1.0, 0))
    same(again, plain)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_grammar_sees_the_accepted_tokens_alone(temperature: float, loaded: Find) -> None:
    model = loaded(BUNDLED)
    pattern = r'\{"name": "[a-z]{3,9}", "tags": \[(true, ){2,4}false\]\}'
    params = [
        SamplingParams(
            max_tokens=60, temperature=temperature, seed=seed, grammar=Grammar("regex", pattern)
        )
        for seed in range(3)
    ]
    prompts = bundled_prompts(3, 60)
    plain, _ = run(model, prompts, params)
    texts = [list(p) + o.tokens for p, o in zip(prompts, plain, strict=True)]
    ours, engine = run(model, prompts, params, Scripted(texts, 0.2, 1))
    same(ours, plain)
    assert engine.core.drafts is not None
    assert engine.core.drafts.accepted_tokens > 20
    same(run(model, prompts, params, NgramProposer(NGRAM))[0], plain)
    assert {o.reason for o in plain} == {FinishReason.STOP}


@pytest.mark.parametrize(("draft", "least"), [("llama", 0.9), ("mistral", 0.0)])
@pytest.mark.parametrize("blocks", [400, 14], ids=["room", "preempted"])
def test_a_draft_model_follows_the_target(
    draft: str, least: float, blocks: int, loaded: Find
) -> None:
    prompts = make_prompts(6, VOCAB, 40)
    params = [
        SamplingParams(
            max_tokens=30, temperature=0.7 * (i % 2), seed=i, ignore_eos=True,
            frequency_penalty=0.5 * (i % 3), top_p=0.9,
        )
        for i in range(6)
    ]  # fmt: skip
    plain, _ = run(loaded("llama"), prompts, params)
    limits = {"blocks": blocks, "max_batched_tokens": 32}
    config = EngineConfig(max_model_len=128, max_seqs=8, **limits)
    proposer = DraftModel(loaded(draft), config, 4)
    ours, engine = run(loaded("llama"), prompts, params, proposer, **limits)
    same(ours, plain)
    pricer, core = engine.core.drafts, proposer._core
    assert pricer is not None
    assert pricer.draft_tokens > 100
    if blocks == 400:
        assert pricer.accepted_tokens >= least * pricer.draft_tokens
        assert core.stats.queried_tokens < 600  # nobody was computed anew
    core.check_integrity()
    assert core.running == core.waiting == 0
    assert core.free_blocks == core.config.blocks


def test_a_draft_model_that_paused_goes_on(loaded: Find) -> None:
    prompts = make_prompts(3, VOCAB, 40)
    params = [SamplingParams(max_tokens=50, temperature=0.0, ignore_eos=True)] * 3
    plain, _ = run(loaded("llama"), prompts, params)
    config = EngineConfig(blocks=400, max_model_len=128, num_speculative_tokens=5)
    proposer = DraftModel(loaded("llama"), config, 4)
    engine = LocalEngine(loaded("llama"), config, proposer=proposer)
    chance = random.Random(0)
    assert engine.core.drafts is not None
    engine.core.drafts.choose = lambda rows, offers: (  # type: ignore[method-assign]
        np.array([chance.choice([0, 0, 3]) for _ in rows], dtype=np.int32)
        * (offers > 3) * (chance.random() < 0.5)
    )  # fmt: skip
    same(engine.generate(prompts, params), plain)
    assert engine.core.drafts.accepted_tokens == engine.core.drafts.draft_tokens > 20


def test_a_draft_model_of_another_vocabulary_is_refused(loaded: Find) -> None:
    config = SpeculativeConfig(num_speculative_tokens=2, model=str(loaded("llama").folder))
    with pytest.raises(ModelError, match="another vocabulary"):
        make_proposer(config, loaded(BUNDLED), EngineConfig(blocks=40, max_model_len=128))
    same_one = make_proposer(config, loaded("mistral"), EngineConfig(blocks=40, max_model_len=128))
    assert isinstance(same_one, DraftModel)


def test_with_drafts_tokens_are_distributed_as_the_model_says(loaded: Find) -> None:
    """Chi-square of pairs of tokens over seeds: five may come first, and five after each."""
    model, prompt, seeds = loaded("llama"), make_prompts(1, VOCAB, 20)[0].tolist(), 400

    def chances(prompts: list[list[int]]) -> list[dict[int, float]]:
        one = SamplingParams(max_tokens=1, temperature=0.0, logprobs=5)
        outputs, _ = run(model, [np.array(p) for p in prompts], [one] * len(prompts))
        reports = [output.logprobs[0] for output in outputs]
        shares = [np.exp(r.logprobs) / np.exp(r.logprobs).sum() for r in reports]
        return [
            dict(zip(r.top.tolist(), p, strict=True)) for r, p in zip(reports, shares, strict=True)
        ]

    [first] = chances([prompt])
    second = dict(zip(first, chances([[*prompt, token] for token in first]), strict=True))
    expected = {(a, b): p * q for a, p in first.items() for b, q in second[a].items()}
    texts = [[*prompt, *pair] for pair in expected]
    params = [SamplingParams(3, top_k=5, seed=seed, ignore_eos=True) for seed in range(seeds)]
    outputs, engine = run(model, [np.array(prompt)] * seeds, params, Scripted(texts, 0.3, 0),
                          blocks=4000, max_seqs=64)  # fmt: skip
    assert engine.core.drafts is not None
    assert 0 < engine.core.drafts.accepted_tokens < engine.core.drafts.draft_tokens
    drawn = [(output.tokens[0], output.tokens[1]) for output in outputs]
    assert set(drawn) <= set(expected)
    likely = [pair for pair, chance in expected.items() if chance * seeds >= 5]
    counts = np.array([drawn.count(pair) for pair in likely])
    means = np.array([expected[pair] * seeds for pair in likely])
    statistic, freedom = ((counts - means) ** 2 / means).sum(), len(likely)
    assert statistic < freedom + 3.1 * np.sqrt(2 * freedom)  # 99.9%, about


def test_a_failing_sampler_fails_one_request_amid_its_drafts(loaded: Find) -> None:
    prompts = make_prompts(2, VOCAB, 30)
    bad = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, repetition_penalty=1.5)
    params = [SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True), bad]
    plain, _ = run(loaded("llama"), prompts, params)
    texts = [list(p) + o.tokens for p, o in zip(prompts, plain, strict=True)]
    config = EngineConfig(blocks=400, max_model_len=128, num_speculative_tokens=5)
    engine = LocalEngine(loaded("llama"), config, proposer=Scripted(texts, 0.0, 3))
    made = engine.executor.sampler

    def failing(sequences: list[TokenSequence], *rest: object) -> object:
        if any(s.params is bad and s.generated == 7 for s in sequences):
            raise ValueError("broken")
        return made(sequences, *rest)

    engine.executor.sampler = failing  # type: ignore[assignment]
    first, second = engine.generate(prompts, params)
    assert first.tokens == plain[0].tokens
    assert second.tokens == plain[1].tokens[:7]
    assert second.reason is FinishReason.ERROR
    assert engine.core.free_blocks == 400


def test_a_continued_sequence_drafts_from_what_it_said_before(loaded: Find) -> None:
    prompt = make_prompts(1, VOCAB, 30)[0]
    params = SamplingParams(max_tokens=40, temperature=0.9, seed=4, ignore_eos=True)
    [whole], _ = run(loaded("qwen3"), [prompt], [params])
    config = EngineConfig(blocks=400, max_model_len=128, num_speculative_tokens=4)
    engine = LocalEngine(loaded("qwen3"), config, proposer=NgramProposer(NGRAM))
    begun = [*prompt, *whole.tokens[:15]]
    rest = engine.add(
        begun, SamplingParams(max_tokens=25, temperature=0.9, seed=4, ignore_eos=True), resume=15
    )
    while rest.reason is None:
        engine.step()
    assert whole.tokens[15:] == rest.tokens


@pytest.mark.parametrize(
    ("tokens", "min_n", "max_n", "expected", "match"),
    [
        ([1, 2, 3, 9, 1, 2, 3], 2, 3, [9, 1, 2, 3], 3),
        ([1, 2, 8, 1, 2, 9, 1, 2], 2, 5, [9, 1, 2, 9], 2),  # the latest
        ([5, 1, 2, 8, 7, 1, 2, 9, 5, 1, 2], 1, 3, [8, 7, 1, 2], 3),  # the longest
        ([4, 4, 4], 1, 3, [4, 4, 4, 4], 2),
        ([1, 2, 3, 4], 1, 3, [], 0),
        ([7, 2, 8, 2], 2, 3, [], 0),
        ([3], 1, 3, [], 0),
    ],
)
def test_a_look_up_continues_the_latest_of_the_longest_matches(
    tokens: list[int], min_n: int, max_n: int, expected: list[int], match: int
) -> None:
    out = np.zeros(4, dtype=np.int32)
    buffer = np.array([*tokens, 1, 2, 3], dtype=np.int32)
    assert look_up(buffer, len(tokens), min_n, max_n, out) == match
    assert not match or out.tolist() == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"method": "eagle3", "num_speculative_tokens": 2}', "not eagle"),
        ('{"method": "ngram", "num_speculative_tokens": 2, "depth": 1}', "depth"),
        ('{"method": "ngram"}', "num_speculative_tokens"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "must be 1 to 64"),
        ('{"num_speculative_tokens": 2}', "model is missing"),
        ('{"method": "ngram", "model": "x", "num_speculative_tokens": 2}', "no other method's"),
        (
            '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2, '
            '"prompt_lookup_min": 3}',
            "prompt_lookup_min is 3",
        ),
        ("ngram", "malformed"),
    ],
)
def test_what_cannot_be_honoured_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_speculation(text)


def test_lookups_have_the_lengths_of_vllm() -> None:
    def lengths(**keys: int) -> tuple[int, int]:
        return SpeculativeConfig(method="ngram", num_speculative_tokens=1, **keys).ngram

    assert lengths() == (5, 5)
    assert lengths(prompt_lookup_max=3) == lengths(prompt_lookup_min=3) == (3, 3)
    assert lengths(prompt_lookup_min=2, prompt_lookup_max=4) == (2, 4)
