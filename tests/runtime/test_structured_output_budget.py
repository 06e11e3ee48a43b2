"""What grammars cost the engine's steps is bounded, whoever asks for it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest

from pigou.config import EngineConfig
from pigou.models import bundled_path
from pigou.request import Grammar, SamplingParams
from pigou.runtime.grammar_trial import try_grammar
from pigou.runtime.local_engine import LocalEngine
from pigou.runtime.models.load import load
from pigou.runtime.sequence import TokenCounts
from pigou.runtime.step_output import GrammarError
from pigou.runtime.structured_output import Debt, Grammars, GrammarState, WorkBudget, read_grammars

MILLISECOND = 1_000_000
AMBIGUOUS = Grammar("grammar", 'start: e\ne: e e | e e e | /[a-z]/ | ""')
SCHEMA = Grammar(
    "json_schema",
    json.dumps(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 20},
                "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
            },
            "required": ["name", "tags"],
        }
    ),
)


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return read_grammars(bundled_path(), 2560, frozenset({1}))


def step(state: GrammarState) -> None:
    allowed = np.flatnonzero(state.allowed())
    state.advance(int(allowed[allowed != 1][0]))


def rises(step_ns: int) -> Iterator[int]:
    now = 0
    while True:
        yield now
        now += step_ns


def test_a_sequence_fails_once_it_overdrew_its_own_burst() -> None:
    budget, debt = WorkBudget(step_ns=10, burst_ns=100, free_ns=1000), Debt()
    for _ in range(20):
        budget.charge(debt, 10)
    for _ in range(10):
        budget.charge(debt, 20)
    with pytest.raises(GrammarError, match="takes too long"):
        budget.charge(debt, 20)


def test_what_all_sequences_add_to_the_steps_is_bounded_however_many_they_are() -> None:
    budget = WorkBudget(step_ns=100, burst_ns=10**9, free_ns=5, shared_step_ns=20,
                        shared_burst_ns=200)  # fmt: skip
    alive = [Debt() for _ in range(64)]
    cheap, excess = Debt(), []
    for _ in range(50):
        budget.begin_step()
        spent = 0
        for debt in list(alive):
            try:
                budget.check(debt)
                spent += 95
                budget.charge(debt, 100)
            except GrammarError:
                alive.remove(debt)
        budget.charge(cheap, 5)  # within what is free: never failed for what others took
        excess.append(spent)
    # The first step's masks are computed before anybody knows what they cost.
    assert not alive
    assert sum(excess) <= 64 * 95
    assert not any(excess[2:])


def test_an_ambiguous_grammar_fails_by_the_cpu_time_that_it_took(grammars: Grammars) -> None:
    matcher = grammars.compile(SCHEMA)
    ticks = rises(15 * MILLISECOND)
    state = GrammarState(matcher, 2560, WorkBudget(), lambda: next(ticks))
    steps = 0
    while steps < 10:
        try:
            step(state)
        except GrammarError as error:
            assert "CPU time" in str(error)  # noqa: PT017
            break
        steps += 1
    assert 1 < steps < 10


def test_a_trial_refuses_what_overruns_and_passes_what_does_not(grammars: Grammars) -> None:
    try_grammar(grammars, SCHEMA)
    with pytest.raises(GrammarError):
        try_grammar(grammars, AMBIGUOUS)


def test_a_request_whose_grammar_overruns_fails_alone() -> None:
    engine = LocalEngine(
        load(bundled_path(), "fp32"), EngineConfig(blocks=400, max_model_len=512, max_repeat=4)
    )
    engine.executor.grammars().budget = WorkBudget(step_ns=0, burst_ns=0)
    healthy = engine.add([5, 6, 7], SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True))
    hostile = engine.add([5, 6, 7], SamplingParams(max_tokens=40, temperature=0.0, grammar=SCHEMA))
    while healthy.reason is None:
        engine.step()
    assert hostile.reason == "error"
    assert hostile.tokens == []
    assert len(healthy.tokens) == 40
    [alone] = engine.generate(
        [[5, 6, 7]], SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    )
    assert healthy.tokens == alone.tokens


def test_the_cache_of_compiled_grammars_is_bounded_in_bytes() -> None:
    text = (bundled_path() / "tokenizer.json").read_text()
    grammars = Grammars(text, 2560, frozenset({1}), cache_bytes=5 * 2**16)
    for number in range(20):
        grammars.start(Grammar("regex", f"a{number}"))
        assert grammars._bytes <= 5 * 2**16
    assert grammars.has(Grammar("regex", "a19"))
    assert not grammars.has(Grammar("regex", "a0"))


@pytest.mark.parametrize("count", [2, 10_000])
def test_choices_of_any_number_cost_one_automaton(grammars: Grammars, count: int) -> None:
    values = [f"c{i}x{i * 7}" for i in range(count)]
    try_grammar(grammars, Grammar("choice", json.dumps(values)))


def test_a_choice_that_begins_another_may_end_or_go_on(grammars: Grammars) -> None:
    state = grammars.start(Grammar("choice", json.dumps(["a", 'ab\n"é'])))
    [a] = grammars.tokenizer.tokenize_str("a")
    assert not state.advance(a)
    allowed = state.allowed()
    assert allowed[1]
    assert allowed.sum() > 1


def test_compact_json_has_no_white_space_between_its_parts(grammars: Grammars) -> None:
    spaces = [i for i in range(5, 2560) if not grammars.tokenizer.decode_str([i]).strip()]
    for grammar, expected in [
        (Grammar("json_object"), False),
        (SCHEMA, False),
        (Grammar("json_object", "", True), True),
    ]:
        state = grammars.start(grammar)
        for token in grammars.tokenizer.tokenize_str("{"):
            state.advance(token)
        assert bool(state.allowed()[spaces].any()) == expected


def test_counts_of_tokens_equal_those_of_the_whole_list() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 300, 2000).tolist()
    counts = TokenCounts(tokens[:500])
    for token in tokens[500:]:
        counts.add(token)
    ids, expected = np.unique(tokens, return_counts=True)
    order = np.argsort(counts.ids)
    assert counts.ids[order].tolist() == ids.tolist()
    assert counts.counts[order].tolist() == expected.tolist()
