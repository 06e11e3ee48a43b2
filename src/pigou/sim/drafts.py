"""Draft tokens of simulated workers: how many are accepted, and how long a draft model takes."""

from __future__ import annotations

import msgspec
import numpy as np

from pigou.config import check_bounds
from pigou.engine.plan import Plan, Result
from pigou.registry import read_keys
from pigou.request import Ints, Nanos
from pigou.sim.timing import StepShape, Timing


class DraftConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Speculation of simulated workers."""

    acceptance: float  # probability that a draft is accepted after the one before
    num_speculative_tokens: int = 4  # most draft tokens that a sequence verifies in a step
    cost: float = 0.0  # step of the draft model, in steps of the model; 0 for n-grams

    def __post_init__(self) -> None:
        check_bounds("acceptance", self.acceptance, ge=0, le=1)
        check_bounds("num_speculative_tokens", self.num_speculative_tokens, ge=1, le=64)
        check_bounds("cost", self.cost, ge=0)


def read_drafts(text: str) -> DraftConfig | None:
    """Read `acceptance=A[,num_speculative_tokens=K][,cost=C]`; raises ConfigError."""
    return read_keys("speculation", DraftConfig, text) if text else None


class SimDrafts:
    """Drafts of one worker; every decoding sequence offers as many as it may."""

    def __init__(self, config: DraftConfig, max_seqs: int, seed: int, worker: int) -> None:
        self.offers: Ints = np.full(max_seqs, config.num_speculative_tokens, dtype=np.int32)
        self._config = config
        self._chance = np.random.default_rng([seed & (2**64 - 1), worker])
        self._drafting_ns = 0

    def draft(self, plan: Plan, timing: Timing) -> int:
        """Return the nanoseconds for which the draft model delays a step."""
        self._drafting_ns = 0
        if len(plan.drafts) and self._config.cost:
            decodes = StepShape(np.ones_like(plan.counts), plan.kv_lens, plan.samples)
            step_ns = self._config.cost * int(timing.durations(decodes, 1)[0])
            self._drafting_ns = round(step_ns * (int(plan.drafts.max()) + 1))
        return self._drafting_ns

    def verify(self, plan: Plan, begin_ns: int, end_times: Nanos) -> Result:
        """Return a plan's result after steps that ended at `end_times`."""
        result = Result(steps=len(end_times), durations=np.diff(end_times, prepend=begin_ns))
        if len(plan.drafts):
            drawn = self._chance.geometric(
                1.0 - min(self._config.acceptance, 1 - 1e-9), len(plan.rows)
            )
            result.accepted = np.minimum(drawn - 1, plan.drafts).astype(np.int32)
            result.drafting = self._drafting_ns
        return result
