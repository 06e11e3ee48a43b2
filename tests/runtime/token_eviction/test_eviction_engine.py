"""Requests over a small pool end as they should, and no pool that suffices changes a token."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.lib.examples import examples

from pigou.config import EngineConfig, EvictionConfig
from pigou.engine.plan import Plan, Rates, Result
from pigou.request import SamplingParams
from pigou.runtime.executor import OnStep
from pigou.runtime.local_engine import LocalEngine, Output
from pigou.runtime.models.load import LoadedModel
from reference import Prompt, make_prompts

Find = Callable[[str], LoadedModel]
VOCAB = 320
POLICIES = ["fifo", "h2o", "lru", "pigou", "random", "snapkv", "streaming"]


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)


def make_engine(
    model: LoadedModel, eviction: EvictionConfig | None, blocks: int, **changes: int
) -> LocalEngine:
    limits = {"max_seqs": 6, "max_model_len": 256, "max_batched_tokens": 96, **changes}
    return LocalEngine(model, EngineConfig(blocks=blocks, eviction=eviction, **limits))


def watched(engine: LocalEngine, prompts: list[Prompt], tokens: int) -> list[Output]:
    """Run prompts; laws are checked at every step."""
    outputs = [engine.add(prompt, greedy(tokens)) for prompt in prompts]
    plain = engine.executor.execute

    def execute(plan: Plan, on_step: OnStep) -> Result:
        result = plain(plan, on_step)
        check(engine, plan, result)
        return result

    engine.executor.execute = execute  # type: ignore[assignment, method-assign]
    for _ in range(5000):
        if all(output.reason for output in outputs):
            break
        engine.step()
        engine.core.check_integrity()
    assert all(len(output.tokens) == tokens for output in outputs)
    return outputs


def check(engine: LocalEngine, plan: Plan, result: Result) -> None:
    """Each head of a row has as many entries as the core thinks, of different tokens."""
    evictor = engine.executor.evictor
    assert evictor is not None
    ends = plan.kv_lens + plan.counts + (result.steps - 1)
    assert (evictor.entries[plan.rows] == ends).all()
    for row, count, after in zip(plan.rows, ends, evictor.next[plan.rows], strict=True):
        kept = evictor.positions(engine.core.tables[row], int(count)).reshape(-1, count)
        ordered = np.sort(kept, axis=1)
        assert (np.diff(ordered, axis=1) > 0).all()
        assert (ordered[:, 0] == 0).all()
        assert (ordered[:, -1] == after - 1).all()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_pool_that_suffices_changes_no_token(policy: str, loaded: Find) -> None:
    model = loaded("qwen3")
    prompts = make_prompts(8, VOCAB, 90, seed=4)
    engines = [make_engine(model, e, 96) for e in (EvictionConfig(policy=policy), None)]
    on, off = ([o.tokens for o in e.generate(prompts, greedy(40))] for e in engines)
    assert on == off


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("repeat", [1, 8])
def test_all_requests_finish_in_a_pool_that_is_too_small(
    policy: str, repeat: int, loaded: Find
) -> None:
    config = EvictionConfig(policy=policy, recent=8, least=16, interval=16)
    engine = make_engine(loaded("llama"), config, 30, max_repeat=repeat)
    watched(engine, make_prompts(8, VOCAB, 70, seed=6), 120)
    assert engine.core.stats.evicted_tokens > 0


@settings(max_examples=examples(12), suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_prefixes_chunks_swaps_and_compactions_go_together(
    data: st.DataObject, loaded: Find
) -> None:
    config = EvictionConfig(
        policy=data.draw(st.sampled_from(POLICIES)), sinks=2, recent=6, least=16, interval=16
    )
    engine = make_engine(
        loaded("llama"),
        config,
        data.draw(st.integers(17, 40)),
        host_blocks=data.draw(st.sampled_from([0, 20])),
        max_batched_tokens=data.draw(st.sampled_from([16, 50, 200])),
        max_repeat=data.draw(st.sampled_from([1, 4])),
    )
    engine.core.rates = Rates(prefill=1.0, swap=1e12, block_bytes=1)
    prompts = make_prompts(6, VOCAB, 60, seed=data.draw(st.integers(0, 9)))
    shared = np.full(32, 7)
    prompts += [np.concatenate((shared, prompt[:20])) for prompt in prompts[:3]]
    watched(engine, prompts, data.draw(st.integers(1, 100)))


def test_the_same_course_gives_the_same_tokens(loaded: Find) -> None:
    config = EvictionConfig(policy="h2o", recent=8, least=16, interval=16)
    prompts = make_prompts(6, VOCAB, 70, seed=6)
    found = []
    for _ in range(2):
        engine = make_engine(loaded("llama"), config, 30)
        found.append([output.tokens for output in watched(engine, prompts, 90)])
    assert found[0] == found[1]
