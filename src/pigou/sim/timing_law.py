"""Timing `law`: steps that take what a straight line says, for fleets known by their figures."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from pigou.config import ConfigError
from pigou.request import SECOND, Nanos
from pigou.sim.timing import StepShape

#: Seconds of each part of a step.
_HOUR_S = 3600


class Law(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Seconds of a step with n sequences that decode, k prompts begun, and t prompt tokens.

    (itl_a + itl_b n, if n > 0) + (prefill k + prefill_token t)
    """

    itl_a: float
    itl_b: float = 0.0  # more for each sequence that decodes
    few: int = 0  # sequences up to which a step takes `itl_few` instead of both; 0 for none
    itl_few: float = 0.0  # of a step with so few: engines run those by other kernels
    prefill: float = 0.0  # of each prompt whose first token is computed in the step
    prefill_token: float = 0.0  # of each token of a prompt
    # `prefill` of a step that decodes as well, where given: what a prompt in chunks adds to the
    # streams' steps.
    mixed: float | None = None
    overhead: float = 0.0  # latency from the client to the worker; no other request waits for it

    def __post_init__(self) -> None:
        for name in ("itl_b", "prefill", "prefill_token", "mixed", "overhead"):
            value = getattr(self, name)
            if value is not None and not 0.0 <= value <= _HOUR_S:
                raise ConfigError(f"{name} is {value}; it must be 0 to {_HOUR_S} seconds (an hour)")
        if not 0.0 < self.itl_a <= _HOUR_S:
            raise ConfigError(
                f"itl_a is {self.itl_a}; it must be above 0, at most {_HOUR_S} seconds (an hour)"
            )
        if self.few < 0 or (self.few > 0) != (0.0 < self.itl_few <= _HOUR_S):
            raise ConfigError(
                f"few is {self.few} and itl_few {self.itl_few}; give both, above 0 and itl_few at "
                f"most {_HOUR_S} seconds (an hour), or none"
            )

    def decode(self, sequences: int) -> float:
        """Return the seconds of a step in which so many sequences decode, 1 and more."""
        if sequences <= self.few:
            return self.itl_few
        return self.itl_a + self.itl_b * sequences


#: Laws of the fleets in "The Price of Anarchy in Disaggregated Inference", fitted to its tables:
#: throughput and latency below the knee of Nemotron-4-340B (1P/2D) and Llama-3.1-70B (1P/5D).
PRESETS = {
    "340b": Law(itl_a=19.0e-3, itl_b=0.026e-3, prefill=45e-3, overhead=74e-3),
    "70b": Law(itl_a=7.15e-3, itl_b=0.0159e-3, prefill=18e-3, overhead=55e-3),
}
#: What these fleets' workers are: model, GPU and GPUs of a worker. It tells their KV blocks.
PRESET_WORKERS = {"340b": ("nemotron-4-340b", "B200", 8), "70b": ("llama-3.1-70b", "B200", 4)}


@dataclass(frozen=True, slots=True)
class LawTiming:
    """A `Law` as a timing model."""

    law: Law

    def durations(self, batch: StepShape, repeat: int) -> Nanos:
        """Return the nanoseconds of each of `repeat` steps, shape (repeat,)."""
        law = self.law
        prompts = batch.counts > 1
        decodes = len(prompts) - int(np.count_nonzero(prompts))
        decode_s = law.decode(decodes) if decodes else 0.0
        if decodes == len(prompts):
            return np.full(repeat, _nanos(decode_s), dtype=np.int64)
        begun = int(np.count_nonzero(prompts & (batch.kv_lens == 0)))
        tokens = int(batch.counts.sum()) - decodes
        prompt_s = law.mixed if decodes and law.mixed is not None else law.prefill
        durations_ns = np.full(
            repeat, _nanos(decode_s + law.prefill_token * tokens), dtype=np.int64
        )
        durations_ns[0] = _nanos(decode_s + (prompt_s * begun + law.prefill_token * tokens))
        return durations_ns


def _nanos(seconds: float) -> int:
    return max(1, round(seconds * SECOND))
