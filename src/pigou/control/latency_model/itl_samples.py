"""Samples of ITL, compiled: what they teach of workers and of prompts, in one pass over all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import bare_kernel_over
from pigou.control.latency_model.prefill_interference import (
    NOISE,
    InterferenceVariance,
    SumArrays,
    add_sample,
    interference_variance,
)
from pigou.control.latency_model.throughput_sampler import ThroughputSample
from pigou.control.latency_model.worker_factors import EvidenceArrays, observe
from pigou.games.regression import LawParameters, curve

Numbers: TypeAlias = NDArray[np.float64]

#: Rows of samples, (7, samples): fields of `ThroughputSample`.
STREAMS, CONTEXT, ITL, STEPS, PROMPTS, PROMPT_TOKENS, WORKER = range(7)
#: Rows of decode-only samples, (3, samples): the ITL without prompts; what it tells, above 0 and at
#: most 1; and the ITL of a worker whose factor is 1.
DECODE_ITL, TRUST, COMMON_ITL = range(3)
#: At least this share of a step is for the streams.
_MIN_DECODE_SHARE = 0.1
#: What a sample tells at least, against one without prompts.
_MIN_TRUST = 1e-6
#: Least seconds between tokens by a law.
_MIN_ITL_S = 1e-9


def sample_table(samples: Sequence[ThroughputSample]) -> Numbers:
    """Return the samples by the names of rows above, (7, samples)."""
    columns = [
        (
            sample.streams, sample.context, sample.itl, sample.steps, sample.prompts,
            sample.prompt_tokens, float(sample.row),
        )
        for sample in samples
    ]  # fmt: skip
    return np.array(columns).T.copy()


@bare_kernel_over("control/latency_model", "games")
def subtract_prompts(
    samples: Numbers, own: Numbers, interference: tuple[float, float],
    doubt: InterferenceVariance, decode: Numbers,
) -> None:  # fmt: skip
    """Subtract what prompts take from the ITL of each sample.

    The rest has the error of the whole, and that of the interference: it tells less than a sample
    without prompts.

    Args:
        samples: by the rows above, (7, samples).
        own: factor of each worker, (workers,).
        interference: what a prompt takes from streams, base and token, in seconds.
        doubt: its variances (`PrefillInterference.variance`).
        decode: takes the result, by the rows above, (3, samples).
    """
    base, token = interference
    for i in range(samples.shape[1]):
        itl, steps = samples[ITL, i], samples[STEPS, i]
        prompts, tokens = samples[PROMPTS, i] / steps, samples[PROMPT_TOKENS, i] / steps
        share = max(1.0 - (base * prompts + token * tokens) / itl, _MIN_DECODE_SHARE)
        error = NOISE + interference_variance(doubt, prompts, tokens) / (itl * itl)
        decode[DECODE_ITL, i] = share * itl
        decode[TRUST, i] = max(NOISE * share * share / error, _MIN_TRUST)
        decode[COMMON_ITL, i] = decode[DECODE_ITL, i] / own[int(samples[WORKER, i])]


@bare_kernel_over("control/latency_model", "games")
def learn_from_samples(
    samples: Numbers, decode: Numbers, own: Numbers, law: LawParameters, floor: float,
    context_token: float, now: int, evidence: EvidenceArrays, sums: SumArrays, keep: float,
) -> None:  # fmt: skip
    """Learn each worker's factor and the prefill interference from samples.

    Args:
        samples, decode: by the rows above.
        own: factor of each worker, before, (workers,).
        law, floor: of the fleet's ITL, for streams that hold nothing.
        context_token: seconds that each token that they hold adds.
        now: nanoseconds.
        evidence: of the factors of ITL (`WorkerFactors.arrays`).
    """
    for i in range(samples.shape[1]):
        w = int(samples[WORKER, i])
        expected = max(curve(law, samples[STREAMS, i], floor), _MIN_ITL_S)
        expected += context_token * samples[CONTEXT, i]
        observe(evidence, w, decode[DECODE_ITL, i] / expected, now, decode[TRUST, i])
        expected *= own[w]
        work_s = samples[STEPS, i] * expected
        add_sample(
            sums, keep, samples[ITL, i] / expected, samples[PROMPTS, i] / work_s,
            samples[PROMPT_TOKENS, i] / work_s,
        )  # fmt: skip
