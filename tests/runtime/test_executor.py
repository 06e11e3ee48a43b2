"""The executor's contract with the core: steps, breaks, sealed blocks, refusals."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from checkpoints import VOCAB

from pigou.config import EngineConfig
from pigou.engine.plan import Plan, Started
from pigou.kv.hashing import chain
from pigou.request import FinishReason, SamplingParams
from pigou.runtime.executor import TorchExecutor
from pigou.runtime.models.load import LoadedModel
from pigou.runtime.step_output import StepOutput

Find = Callable[[str], LoadedModel]
SEED = b"tenure"
CONFIG = EngineConfig(blocks=32, max_model_len=128, max_seqs=4)


@pytest.fixture
def executor(loaded: Find) -> TorchExecutor:
    tables = np.arange(32, dtype=np.int32).reshape(4, 8)
    model = loaded("llama")
    return model.executor(model.cache(32, 16), tables, 128)


def greedy(tokens: int = 20, **changes: object) -> SamplingParams:
    settings = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True, **changes}
    return SamplingParams(**settings)  # type: ignore[arg-type]


def plan(
    spans: list[tuple[int, int, int]], started: list[str], repeat: int = 1, **changes: object
) -> Plan:
    """Entries (row, start, count); requests that start take the first rows."""
    rows, starts, counts = (np.array(column, dtype=np.int32) for column in zip(*spans, strict=True))
    return Plan(
        rows=rows,
        starts=starts,
        counts=counts,
        kv_lens=starts.copy(),
        samples=np.ones(len(rows), dtype=np.bool_),
        repeat=repeat,
        started=[Started(request, row, 0) for row, request in enumerate(started)],
        **changes,  # type: ignore[arg-type]
    )


def test_a_repeated_plan_gives_one_token_a_step(executor: TorchExecutor) -> None:
    executor.add("a", [5] * 10, greedy(), SEED)
    executor.execute(plan([(0, 0, 10)], ["a"]))
    steps: list[StepOutput] = []
    result = executor.execute(plan([(0, 10, 1)], [], repeat=7), lambda s: steps.append(s) is None)
    assert result.steps == len(steps) == len(result.durations) == 7
    got = [int(step.tokens[0]) for step in steps]
    assert executor.tokens("a").tolist()[11:] == got


def test_a_plan_is_broken_off_when_it_is_told_to(executor: TorchExecutor) -> None:
    executor.add("a", [5] * 10, greedy(), SEED)
    executor.execute(plan([(0, 0, 10)], ["a"]))
    seen: list[StepOutput] = []

    def third(step: StepOutput) -> bool:
        seen.append(step)
        return len(seen) < 3

    assert executor.execute(plan([(0, 10, 1)], [], repeat=9), third).steps == 3
    assert len(executor.tokens("a")) == 14


def test_no_step_begins_after_the_horizon(executor: TorchExecutor) -> None:
    executor.add("a", [5] * 10, greedy(), SEED)
    assert executor.execute(plan([(0, 0, 10)], ["a"], horizon=0)).steps == 1
    assert executor.execute(plan([(0, 10, 1)], [], repeat=9, horizon=0)).steps == 1


def test_a_plan_ends_with_the_first_sequence_that_ends(executor: TorchExecutor) -> None:
    executor.add("probe", [5] * 10, greedy(), SEED)
    executor.execute(plan([(0, 0, 10)], ["probe"]))
    executor.execute(plan([(0, 10, 1)], [], repeat=8))
    output = executor.tokens("probe").tolist()[10:]
    stop = next(t for t in output[1:] if t != output[0])
    place = output.index(stop)
    executor.add("a", [5] * 10, greedy(stop_token_ids=frozenset({stop})), SEED)
    executor.add("b", [9] * 10, greedy(), SEED)
    executor.execute(plan([(0, 0, 10), (1, 0, 10)], ["a", "b"]))
    result = executor.execute(plan([(0, 10, 1), (1, 10, 1)], [], repeat=20))
    assert result.steps == place
    assert [(f.entry, f.reason, f.steps) for f in result.finished] == [
        (0, FinishReason.STOP, place)
    ]


def test_sealed_hashes_continue_the_prompt_s_chain(executor: TorchExecutor) -> None:
    prompt = list(range(3, 43))
    executor.add("a", prompt, greedy(60), SEED)
    result = executor.execute(plan([(0, 0, 40)], ["a"]))
    assert not result.full_block_hashes
    sealed = []
    at = 40
    for repeat in (3, 20, 30):
        result = executor.execute(plan([(0, at, 1)], [], repeat=repeat))
        at += result.steps
        sealed += [*result.full_block_hashes.get(0, [])]
    whole = chain(executor.tokens("a")[:at], 16, SEED)
    assert len(whole) == at // 16
    assert np.array_equal(sealed, whole[2:])


def test_hashes_that_the_core_was_not_told_are_sealed_when_they_are_full(
    executor: TorchExecutor,
) -> None:
    prompt = list(range(3, 53))
    known = chain(prompt, 16, SEED)
    executor.add("a", prompt, greedy(), SEED, hashes=known[:1])
    executor.add("b", prompt, greedy(), b"")
    result = executor.execute(plan([(0, 0, 50), (1, 0, 50)], ["a", "b"]))
    assert list(result.full_block_hashes) == [0]
    assert np.array_equal(result.full_block_hashes[0], known[1:])


def test_a_sequence_with_evicted_entries_seals_nothing(executor: TorchExecutor) -> None:
    executor.add("a", list(range(3, 34)), greedy(), SEED)
    executor.execute(plan([(0, 0, 31)], ["a"]))
    evicted = plan([(0, 31, 1)], [])
    evicted.kv_lens[:] = 15
    assert not executor.execute(evicted).full_block_hashes


def test_a_chunk_that_does_not_sample_yields_no_token(executor: TorchExecutor) -> None:
    executor.add("a", list(range(3, 34)), greedy(), SEED)
    part = plan([(0, 0, 20)], ["a"])
    part.samples[:] = False
    steps: list[StepOutput] = []
    executor.execute(part, lambda s: steps.append(s) is None)
    assert steps[0].tokens.tolist() == [-1]
    assert len(executor.tokens("a")) == 31


@pytest.mark.parametrize(
    ("tokens", "changes", "message"),
    [
        ([VOCAB], {}, f"a prompt token is {VOCAB}"),
        ([-1], {}, "a prompt token is -1"),
        ([3], {"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        ([3], {"stop_token_ids": frozenset({-5})}, "stop_token_ids is -5"),
        ([], {}, "0 of 0 tokens"),
    ],
)
def test_tokens_outside_the_vocabulary_are_refused(
    tokens: list[int], changes: dict[str, object], message: str, executor: TorchExecutor
) -> None:
    with pytest.raises(ValueError, match=message):
        executor.add("a", tokens, greedy(**changes), SEED)


def test_an_id_is_refused_while_it_is_in_use_and_free_once_dropped(
    executor: TorchExecutor,
) -> None:
    executor.add("a", [3], greedy(), SEED)
    with pytest.raises(ValueError, match="'a' is here already"):
        executor.add("a", [3], greedy(), SEED)
    executor.drop("a")
    executor.drop("a")
    executor.add("a", [3], greedy(), SEED)
