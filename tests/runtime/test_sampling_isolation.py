"""Laws of faults that one sequence causes: it fails, the others of its batch go on as if alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from pigou.engine.plan import Plan, Started
from pigou.request import FinishReason, SamplingParams
from pigou.runtime import executor as executor_module
from pigou.runtime import sampling as sampling_module
from pigou.runtime.executor import TorchExecutor
from pigou.runtime.models.load import LoadedModel
from pigou.runtime.sequence import TokenSequence
from pigou.runtime.step_output import StepOutput, is_contained

Find = Callable[[str], LoadedModel]
#: Fields of requests that take each way through the sampler.
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "biased": {"temperature": 0.0, "logit_bias": {7: 1.0}},
    "random": {"temperature": 1.0, "seed": 3, "top_k": 5},
    "reported": {"temperature": 0.0, "logprobs": 2},
}


@pytest.fixture
def executor(loaded: Find) -> TorchExecutor:
    tables = np.arange(32, dtype=np.int32).reshape(4, 8)
    model = loaded("llama")
    return model.executor(model.cache(32, 16), tables, 128)


def plan(rows: int, start: int, count: int, started: list[str], repeat: int = 1) -> Plan:
    starts = np.full(rows, start, dtype=np.int32)
    return Plan(
        rows=np.arange(rows, dtype=np.int32),
        starts=starts,
        counts=np.full(rows, count, dtype=np.int32),
        kv_lens=starts.copy(),
        samples=np.ones(rows, dtype=np.bool_),
        repeat=repeat,
        started=[Started(name, row, 0) for row, name in enumerate(started)],
    )


def run(executor: TorchExecutor, steps: int = 4) -> tuple[dict[str, list[int]], list[StepOutput]]:
    """Compute all ways side by side; return their outputs, and what each step told."""
    names = list(WAYS)
    for at, name in enumerate(names):
        params = SamplingParams(max_tokens=20, ignore_eos=True, **WAYS[name])
        executor.add(name, [5 + at] * 10, params, b"tenure")
    told: list[StepOutput] = []
    executor.execute(plan(len(names), 0, 10, names), lambda s: told.append(s) is None)
    executor.execute(plan(len(names), 10, 1, [], steps), lambda s: told.append(s) is None)
    said = {name: executor.tokens(name)[10:].tolist() for name in names}
    for name in names:
        executor.drop(name)
    return said, told


def fault(monkeypatch: pytest.MonkeyPatch, place: str, victim: str) -> None:
    """Let a place raise for one sequence, from its second token on."""

    def hits(sequence: TokenSequence) -> bool:
        return sequence.request == victim and sequence.generated >= 1

    if place == "append":
        append = TokenSequence.append

        def failing(self: TokenSequence, token: int) -> bool:
            if hits(self):
                raise RuntimeError("injected")
            return append(self, token)

        monkeypatch.setattr(TokenSequence, "append", failing)
        return
    call = sampling_module.Sampler.__call__

    def sample(self: Any, logits: Tensor) -> Any:
        if place == "overwritten":
            result = call(self, logits)
            logits.zero_()
        if any(hits(sequence) for sequence in self._sequences):
            raise IndexError("injected")
        return result if place == "overwritten" else call(self, logits)

    monkeypatch.setattr(sampling_module.Sampler, "__call__", sample)


@pytest.mark.parametrize("victim", list(WAYS))
@pytest.mark.parametrize("place", ["append", "sampler", "overwritten"])
def test_a_fault_of_one_row_fails_that_row_and_the_others_say_what_they_say_alone(
    executor: TorchExecutor, monkeypatch: pytest.MonkeyPatch, place: str, victim: str
) -> None:
    expected, _ = run(executor)
    fault(monkeypatch, place, victim)
    said, told = run(executor)
    entry = list(WAYS).index(victim)
    assert [list(step.broken) for step in told] == [[], [entry]]
    assert "injected" in told[-1].broken[entry]
    assert told[-1].tokens[entry] == -1
    for name in WAYS:
        assert said[name] == expected[name][: 1 if name == victim else 2], name


def test_a_row_that_fails_ends_in_error_and_its_blocks_return(
    executor: TorchExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch, "sampler", "greedy")
    for at, name in enumerate(WAYS):
        executor.add(name, [5 + at] * 10, SamplingParams(max_tokens=9, **WAYS[name]), b"t")
    executor.execute(plan(len(WAYS), 0, 10, list(WAYS)))
    result = executor.execute(plan(len(WAYS), 10, 1, [], 4))
    assert [(f.entry, f.reason) for f in result.finished] == [(0, FinishReason.ERROR)]
    assert result.steps == 1


def test_the_device_s_errors_are_not_contained(
    executor: TorchExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sample(self: Any, logits: Tensor) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(sampling_module.Sampler, "__call__", sample)
    with pytest.raises(RuntimeError, match="CUDA"):
        run(executor)
    assert executor_module.is_contained is is_contained
    panic = type("PanicException", (BaseException,), {})
    assert is_contained(panic("rust"))
    assert is_contained(KeyError("x"))
    assert not is_contained(KeyboardInterrupt())
