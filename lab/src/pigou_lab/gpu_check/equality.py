"""The same weights on two devices: which tokens they choose, and how probable they say they are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pigou.runtime.local_engine import Output
from pigou.runtime.models.load import LoadedModel
from pigou.sampling import SamplingParams
from pigou_lab.gpu_check.speed import make_engine


@dataclass(frozen=True, slots=True)
class DeviceComparison:
    """How greedy outputs of two devices compare, up to the first token that differs."""

    tokens: int
    divergences: int  # outputs that differ where the best two tokens were no near tie
    ties: int  # outputs that differ where they were
    difference: float  # root mean square of the log-probabilities' differences
    largest: float


def compare(
    first: LoadedModel, second: LoadedModel, *, gap: float, prompts: int = 8, output: int = 32
) -> DeviceComparison:
    """Decode the same prompts greedily with both.

    Args:
        second: the same weights elsewhere.
        gap: nats between the best two tokens below which either may be chosen.
        prompts: how many, of 1 to 100 tokens.
        output: tokens of each output.
    """
    outputs = [_decode(model, prompts, output) for model in (first, second)]
    differences: list[float] = []
    tokens = divergences = ties = 0
    for one, other in zip(*outputs, strict=True):
        for left, right in zip(one.logprobs, other.logprobs, strict=False):
            if left.token != right.token:
                near = float(left.logprobs[0] - left.logprobs[1]) < gap
                ties, divergences = ties + near, divergences + (not near)
                break
            tokens += 1
            differences.append(abs(left.logprob - right.logprob))
    array = np.array(differences or [float("inf")])
    return DeviceComparison(
        tokens, divergences, ties, float(np.sqrt((array**2).mean())), float(array.max())
    )


def _decode(model: LoadedModel, prompts: int, output: int) -> list[Output]:
    rng = np.random.default_rng(0)
    texts = [rng.integers(3, model.config.vocab, size=rng.integers(1, 101)) for _ in range(prompts)]
    params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True, logprobs=2)
    return make_engine(model, prompts, 101 + output).generate(texts, params)
