"""What the samples of a harvest teach, compiled: one pass over all of them.

samples: what workers did (`pigou.control.latency_model.flow.Sample`), (7, n); the rows below.
bare: the ITL that each would have had without prompts, how much that tells, and that ITL on a
    worker like most, (3, n).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import bare_kernel_over
from pigou.control.latency_model.scales_kernel import observe
from pigou.control.latency_model.stall_kernel import NOISE, add, variance
from pigou.games.regression import Curve, curve

Numbers = NDArray[np.float64]
Nanos = NDArray[np.int64]

#: Rows of `samples`.
STREAMS, CONTEXT, ITL, STEPS, PROMPTS, WORK, WORKER = range(7)
#: Rows of `bare`.
ALONE, SURE, ALIKE = range(3)
#: At least so much of a step is for the streams.
_LEAST_BARE = 0.1
#: What a sample tells at least, beside one without prompts.
_LEAST_SURE = 1e-6
#: Seconds between tokens that a law says at least.
_LEAST_ITL = 1e-9


@bare_kernel_over("control/latency_model", "games")
def strip(
    samples: Numbers, own: Numbers, taken: tuple[float, float], doubt: tuple[float, float, float],
    bare: Numbers,
) -> None:  # fmt: skip
    """Take prompts off what each sample's streams took.

    What is left has the error of the whole, and that of what prompts are taken for: it tells as
    much less than a sample without prompts.

    Args:
        samples: see above.
        own: factor of each worker, (workers,).
        taken: what a prompt takes from streams, base and slope, in seconds.
        doubt: its variances, of prompts, between, and of tokens (`Stall.doubt`).
        bare: takes the result.
    """
    base, token = taken
    for i in range(samples.shape[1]):
        itl, steps = samples[ITL, i], samples[STEPS, i]
        prompts, tokens = samples[PROMPTS, i] / steps, samples[WORK, i] / steps
        left = max(1.0 - (base * prompts + token * tokens) / itl, _LEAST_BARE)
        error = NOISE + variance(doubt, prompts, tokens) / (itl * itl)
        bare[ALONE, i] = left * itl
        bare[SURE, i] = max(NOISE * left * left / error, _LEAST_SURE)
        bare[ALIKE, i] = bare[ALONE, i] / own[int(samples[WORKER, i])]


@bare_kernel_over("control/latency_model", "games")
def compare(
    samples: Numbers, bare: Numbers, own: Numbers, law: Curve, floor: float, each: float, now: int,
    weight: Numbers, mean: Numbers, variance: Numbers, at: Nanos,
    gram: Numbers, moment: Numbers, keep: float,
) -> None:  # fmt: skip
    """Learn each worker's factor, and what prompts take, beside what the law says of each sample.

    Args:
        samples, bare: see above.
        own: factor of each worker, before, (workers,).
        law, floor: of the fleet's ITL, for streams that hold nothing.
        each: seconds that a token which they hold adds to it.
        now: nanoseconds.
        weight, mean, variance, at: of the scales of ITL.
        gram, moment, keep: of `Stall`.
    """
    for i in range(samples.shape[1]):
        row = int(samples[WORKER, i])
        expected = max(curve(law, samples[STREAMS, i], floor), _LEAST_ITL)
        expected += each * samples[CONTEXT, i]
        observe(weight, mean, variance, at, row, bare[ALONE, i] / expected, now, bare[SURE, i])
        expected *= own[row]
        work = samples[STEPS, i] * expected
        add(
            gram, moment, keep, samples[ITL, i] / expected, samples[PROMPTS, i] / work,
            samples[WORK, i] / work,
        )  # fmt: skip
