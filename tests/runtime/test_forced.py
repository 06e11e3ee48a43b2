"""Teacher forcing: the given tokens come, and are as probable as in a prompt."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from benchmarks.token_eviction.forced import force
from pigou.config import EngineConfig
from pigou.request import SamplingParams
from pigou.runtime.local_engine import LocalEngine
from pigou.runtime.models.load import LoadedModel

Find = Callable[[str], LoadedModel]
PROMPT, FORCED = 20, 37


def engine(model: LoadedModel, **changes: int) -> LocalEngine:
    config = {"blocks": 40, "max_seqs": 4, "max_model_len": 128, **changes}
    return LocalEngine(model, EngineConfig(prefix_caching=False, **config))  # type: ignore[arg-type]


def texts(count: int) -> np.ndarray:
    return np.random.default_rng(5).integers(3, 300, size=(count, PROMPT + FORCED))


@pytest.mark.parametrize("changes", [{}, {"max_repeat": 8}, {"blocks": 9}])
def test_forced_tokens_are_as_probable_as_in_a_prompt(
    loaded: Find, changes: dict[str, int]
) -> None:
    """Also in repeated plans, and where rows preempt one another (9 blocks are too few)."""
    model = loaded("llama")
    local = engine(model, **changes)
    forcing = force(local.executor)
    params = SamplingParams(max_tokens=FORCED, temperature=0.0, ignore_eos=True)
    outputs, scripts = [], []
    for text in texts(3):
        outputs.append(local.add(text[:PROMPT], params, tenant="t"))
        scripts.append(forcing.expect(outputs[-1].request, text[PROMPT:]))
    while any(output.reason is None for output in outputs):
        local.step()
    assert (local.core.stats.preemptions > 0) == ("blocks" in changes)
    assert forcing.spent > 0
    whole = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    for text, output, script in zip(texts(3), outputs, scripts, strict=True):
        (read,) = engine(model).generate([text], whole)
        given = [each.logprob for each in read.prompt_logprobs[PROMPT:] if each is not None]
        assert output.tokens == text[PROMPT:].tolist()
        np.testing.assert_allclose(script.logprobs, given, atol=1e-4)


def test_who_has_no_script_or_has_said_it_samples(loaded: Find) -> None:
    model = loaded("llama")
    local = engine(model)
    forcing = force(local.executor)
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    text = texts(1)[0]
    free = local.add(text[:PROMPT], params)
    led = local.add(text[:PROMPT], params)
    forcing.expect(led.request, [7, 9])
    while led.reason is None or free.reason is None:
        local.step()
    (plain,) = engine(model).generate([text[:PROMPT]], params)
    (after,) = engine(model).generate(
        [[*text[:PROMPT].tolist(), 7, 9]],
        SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True),
    )
    assert free.tokens == plain.tokens
    assert led.tokens == [7, 9, *after.tokens]
