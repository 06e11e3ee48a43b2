"""Throughput sampler: tokens per second of each worker, and what they teach the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
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
from pigou.control.latency_model.worker_factors import EvidenceArrays, observe
from pigou.games.regression import LawParameters, curve
from pigou.request import SECOND

#: A sample needs as much time, in seconds, and as many tokens.
_MIN_SAMPLE_S = 0.25
_MIN_SAMPLE_TOKENS = 4
#: Samples of one worker that may be pending until a prompt ends; the oldest is given up.
_MAX_PENDING = 1024
Numbers: TypeAlias = NDArray[np.float64]
#: Rows of samples, (7, samples): fields of `ThroughputSample`.
STREAMS, CONTEXT, ITL, STEPS, PROMPTS, PROMPT_TOKENS, WORKER = range(7)
#: Rows of decode-only samples, (3, samples): the ITL without prompts; what it tells, above 0 and at
#: most 1; and the ITL of a worker whose factor is 1.
DECODE_ITL, TRUST, COMMON_ITL = range(3)
#: At least this share of a step is for the streams.
_MIN_DECODE_SHARE = 0.1
#: Minimum weight of a sample, relative to one without prompts.
_MIN_TRUST = 1e-6
#: Least seconds between tokens by a law.
_MIN_ITL_S = 1e-9


@dataclass(slots=True)
class ThroughputSample:
    """Throughput of one worker over some time."""

    row: int
    streams: float  # mean number of streams while any decoded
    context: float  # mean tokens of these streams, prompts and outputs
    itl: float  # seconds between tokens
    steps: float = 1.0
    prompts: float = 0.0
    prompt_tokens: float = 0.0  # uncached tokens of prompts, pairs included
    mixed_s: float = 0.0  # seconds of prompts not ended yet


@dataclass(slots=True)
class _Sums:
    """Integrals over the time since the last sample."""

    seconds: float = 0.0
    decoding_s: float = 0.0  # stream-seconds of streams whose tokens are seen
    stream_s: float = 0.0
    context_s: float = 0.0  # token-seconds of their contexts
    prompts: float = 0.0
    prompt_tokens: float = 0.0
    mixed_s: float = 0.0

    def sample(self, tokens: int) -> ThroughputSample:
        itl, streams = self.decoding_s / tokens, self.stream_s / self.seconds
        context, steps = self.context_s / self.seconds, self.seconds / itl
        return ThroughputSample(
            -1, streams, context, itl, steps, self.prompts, self.prompt_tokens, self.mixed_s
        )


@dataclass(slots=True)
class _Row:
    """Progress of one worker."""

    decoding: int = 0  # streams whose tokens are seen
    sums: _Sums = field(default_factory=_Sums)
    pending: list[ThroughputSample] = field(default_factory=list)  # until prompts have ended
    advanced_at: int = 0  # nanoseconds
    computes: bool = False  # True if it has prompts to compute


class ThroughputSampler:
    """Time integrals per worker.

    ITL is stream-seconds of decode over tokens, for requests whose tokens are seen. A sample is
    pending until each prompt computed in it has ended, which then counts by its share of time.
    """

    def __init__(self) -> None:
        self._rows: list[_Row] = []
        #: tokens after the first ones of streams, (workers,)
        self.tokens: NDArray[np.int64] = np.zeros(0, dtype=np.int64)

    def add_worker(self) -> None:
        """Add a worker as the last row."""
        self._rows.append(_Row())
        self.tokens = np.append(self.tokens, 0)

    def remove_worker(self, row: int) -> None:
        """Remove a worker."""
        del self._rows[row]
        self.tokens = np.delete(self.tokens, row)

    def advance(self, row: int, streams: int, context: int, prompts: int, now: int) -> None:
        """Advance worker `row` to `now`; its streams hold `context` tokens."""
        worker = self._rows[row]
        if worker.decoding:
            seconds = (now - worker.advanced_at) / SECOND
            sums = worker.sums
            sums.seconds += seconds
            sums.decoding_s += worker.decoding * seconds
            sums.stream_s += max(streams, worker.decoding) * seconds
            sums.context_s += context * seconds
            if prompts:
                sums.mixed_s += seconds
        worker.computes = prompts > 0
        worker.advanced_at = now

    def change_streams(self, row: int, change: int) -> None:
        """Add or remove decoding streams, after `advance`."""
        self._rows[row].decoding += change

    def add_prompt(self, row: int, tokens: float, seconds: float) -> None:
        """Add a prompt computed in `seconds`, beside streams if any."""
        worker = self._rows[row]
        unexplained: list[ThroughputSample | _Sums] = [*worker.pending, worker.sums]
        for sample in unexplained:
            if sample.mixed_s:
                share = min(1.0, sample.mixed_s / max(seconds, 1e-9))
                sample.prompts += share
                sample.prompt_tokens += share * tokens
                sample.mixed_s = 0.0

    def take_samples(self) -> Iterator[ThroughputSample]:
        """Yield and reset the samples of workers that decoded long enough."""
        for row, worker in enumerate(self._rows):
            pending, tokens = worker.pending, self.tokens.item(row)
            if worker.sums.seconds >= _MIN_SAMPLE_S and tokens >= _MIN_SAMPLE_TOKENS:
                pending.append(worker.sums.sample(tokens))
                worker.sums = _Sums()
                self.tokens[row] = 0
            if not pending:
                continue
            ready = next((i for i, sample in enumerate(pending) if sample.mixed_s), len(pending))
            if not worker.computes:  # a prompt was given up: its samples stay unexplained
                pending[:] = [sample for sample in pending if not sample.mixed_s]
                ready = len(pending)
            for sample in pending[:ready]:
                sample.row = row  # workers may have left since
                yield sample
            del pending[: max(ready, len(pending) - _MAX_PENDING)]


def sample_table(samples: Sequence[ThroughputSample]) -> Numbers:
    """Return the samples as rows, (7, samples)."""
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
    """Subtract prefill interference (seconds) from samples' ITL; write `decode` (3, samples)."""
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
    """Learn worker factors and prefill interference from samples, by the fleet's law."""
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
