"""llm-d's default: stick to the warm workers until they are saturated."""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec
import numpy as np

from pigou.control.routing.limits import finite, share
from pigou.control.routing.policy import Costs, RequestView
from pigou.control.routing.stages import (
    Rows,
    Stage,
    Staged,
    pending,
    share_held,
    uncached,
)
from pigou.control.routing.view import Flags, FleetView


class LlmDParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `LlmD`, with its defaults.

    Attributes:
        affinity_threshold: share of the prompt's blocks that makes a worker sticky.
        max_ttft_penalty: seconds that the best sticky worker may be behind the best other one;
            0 sticks always.
        peak_prefill_throughput: tokens a second of a prompt; llm-d's default was measured for a
            32B model on 2 H100, and is to be measured anew for anything else.
        exploration_probability: chance that a request is not held to the sticky workers.
        bound: what a whole request is scored by: `prefill` tokens, or `decode` requests.
    """

    affinity_threshold: float = 0.8
    max_ttft_penalty: float = 18.0
    peak_prefill_throughput: float = 15928.0
    exploration_probability: float = 0.0
    bound: Literal["prefill", "decode"] = "prefill"

    def __post_init__(self) -> None:
        share(self, "affinity_threshold", "exploration_probability")
        finite(self, "max_ttft_penalty")
        if not 0.0 < self.peak_prefill_throughput < float("inf"):
            raise ValueError(
                f"peak_prefill_throughput is {self.peak_prefill_throughput}; "
                "it must be a finite number above 0"
            )


class LlmD(Staged):
    """A filter, then a score. With t_i tokens of prompts in flight and r_i blocks held:

        sticky   W = {i: r_i >= affinity_threshold}; all workers are kept if W is empty, or if
                 min over W of t_i / R  -  min over the others of t_i / R  >  max_ttft_penalty
        score    cost_i = t_i + u_i tokens (prefill-bound), or requests in flight (decode-bound)

    R is the peak prefill throughput, u_i the tokens of the prompt that i does not hold. llm-d
    router 0.9, `prefix-cache-affinity-filter` with `token-load-scorer` or
    `active-request-scorer`; llm-d.ai/blog, "Sticky Until Saturated".

    Pairs: prefill workers by tokens, decode workers by requests, each behind the filter.

    Args:
        params: parameters.
        seed: of the draws for exploration.
    """

    name: ClassVar[str] = "llm-d"

    def __init__(self, params: LlmDParams | None = None, seed: int = 0) -> None:
        self.params = params or LlmDParams()
        self._generator = np.random.default_rng(seed)

    def stage(
        self, request: RequestView, fleet: FleetView, rows: Rows, stage: Stage
    ) -> dict[str, Costs]:
        """Return the load, and `not_sticky`, which forbids, (rows,)."""
        decode = self.params.bound == "decode" if stage is Stage.WHOLE else stage is Stage.DECODE
        if decode:
            found = {"requests": pending(fleet, rows, stage).astype(np.float64)}
        else:
            found = {
                "queued": fleet.prefill_tokens[rows].astype(np.float64),
                "uncached": uncached(request, fleet, rows),
            }
        kept = self._kept(request, fleet, rows)
        if kept is not None:
            found["not_sticky"] = np.where(kept, 0.0, np.inf)
        return found

    def _kept(self, request: RequestView, fleet: FleetView, rows: Rows) -> Flags | None:
        own = self.params
        sticky: Flags = share_held(request, fleet, rows) >= own.affinity_threshold
        held = np.count_nonzero(sticky)
        if held in (0, len(rows)) or self._explores():
            return None
        tokens = fleet.prefill_tokens[rows]
        behind = float(tokens[sticky].min() - tokens[~sticky].min())
        seconds = behind / own.peak_prefill_throughput
        return None if 0.0 < own.max_ttft_penalty < seconds else sticky

    def _explores(self) -> bool:
        chance = self.params.exploration_probability
        return chance > 0.0 and float(self._generator.random()) < chance
