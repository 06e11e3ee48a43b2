"""llm-d's routing: its default, the blend of scores before it, conditional disaggregation."""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec
import numpy as np

from pigou.config import check_fields
from pigou.control.routing.policy import (
    MAX_WEIGHT,
    Costs,
    RequestView,
    total,
)
from pigou.control.routing.pool_policy import (
    Pool,
    PoolPolicy,
    Rows,
    pending,
)
from pigou.control.routing.view import Candidates, FleetView
from pigou.request import Flags
from pigou_lab.routing.conditional_disaggregation import (
    ConditionalDisaggregation,
    ConditionalDisaggregationParams,
)
from pigou_lab.routing.lmetric import uncached


class LlmDParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `LlmD`, with its defaults."""

    affinity_threshold: float = 0.8  # share of the prompt's blocks that makes a worker sticky
    # seconds that the best sticky worker may be behind the best other one; 0 sticks always.
    max_ttft_penalty: float = 18.0
    # tokens a second of a prompt; llm-d's default was measured for a 32B model on 2 H100, and is to
    # be measured anew for anything else.
    peak_prefill_throughput: float = 15928.0
    exploration_probability: float = 0.0  # chance that a request is not held to the sticky workers
    # load that a whole request is scored by: `prefill` tokens, or `decode` requests.
    bound: Literal["prefill", "decode"] = "prefill"

    def __post_init__(self) -> None:
        check_fields(self, "affinity_threshold", "exploration_probability", ge=0, le=1)
        check_fields(self, "max_ttft_penalty", ge=0, le=MAX_WEIGHT)
        if not 0.0 < self.peak_prefill_throughput < float("inf"):
            raise ValueError(
                f"peak_prefill_throughput is {self.peak_prefill_throughput}; "
                "it must be a finite number above 0"
            )


class LlmD(PoolPolicy):
    """A filter, then a score. With t_i tokens of prompts in flight and r_i blocks held:

        sticky   W = {i: r_i >= affinity_threshold}; all workers are kept if W is empty, or if
                 min over W of t_i / R  -  min over the others of t_i / R  >  max_ttft_penalty
        score    cost_i = t_i + u_i tokens (prefill-bound), or requests in flight (decode-bound)
    R: peak prefill throughput; u_i: prompt tokens that i does not hold. Pairs: prefill by tokens,
    decode by requests. llm-d router 0.9, `prefix-cache-affinity-filter` with `token-load-scorer` or
    `active-request-scorer`; llm-d.ai/blog, "Sticky Until Saturated".
    """

    name: ClassVar[str] = "llm-d"

    def __init__(self, params: LlmDParams | None = None, seed: int = 0) -> None:
        self.params = params or LlmDParams()
        self._generator = np.random.default_rng(seed)

    def pool_costs(
        self, request: RequestView, fleet: FleetView, rows: Rows, pool: Pool
    ) -> dict[str, Costs]:
        """Return the load, and `not_sticky`, which forbids, (rows,)."""
        decode = self.params.bound == "decode" if pool is Pool.AGGREGATED else pool is Pool.DECODE
        if decode:
            parts = {"requests": pending(fleet, rows, pool).astype(np.float64)}
        else:
            parts = {
                "queued": fleet.prefill_tokens[rows].astype(np.float64),
                "uncached": uncached(request, fleet, rows),
            }
        sticky = self._sticky_rows(request, fleet, rows)
        if sticky is not None:
            parts["not_sticky"] = np.where(sticky, 0.0, np.inf)
        return parts

    def _sticky_rows(self, request: RequestView, fleet: FleetView, rows: Rows) -> Flags | None:
        own = self.params
        sticky: Flags = _share_held(request, fleet, rows) >= own.affinity_threshold
        held = np.count_nonzero(sticky)
        if held in (0, len(rows)) or self._explores():
            return None
        tokens = fleet.prefill_tokens[rows]
        excess_tokens = float(tokens[sticky].min() - tokens[~sticky].min())
        seconds = excess_tokens / own.peak_prefill_throughput
        return None if 0.0 < own.max_ttft_penalty < seconds else sticky

    def _explores(self) -> bool:
        chance = self.params.exploration_probability
        return chance > 0.0 and float(self._generator.random()) < chance


class LlmDBlendParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `LlmDBlend`, with its defaults."""

    prefix: float = 3.0  # weight of the prefix score
    queue: float = 2.0  # weight of the queue score
    kv: float = 2.0  # weight of the score of free KV memory
    no_hit_lru: float = 2.0  # weight of the score that spreads cold prompts
    prefix_length_weight: float = 0.0  # share of the prefix score that goes by length, 0 to 1
    max_model_len: int = 8192  # tokens that count as a full length

    def __post_init__(self) -> None:
        check_fields(self, "prefix", "queue", "kv", "no_hit_lru", ge=0, le=MAX_WEIGHT)
        check_fields(self, "prefix_length_weight", ge=0, le=1)
        check_fields(self, "max_model_len", ge=1, infinite=True)


class LlmDBlend(PoolPolicy):
    """cost_i = -(3 prefix_i + 2 queue_i + 2 kv_i + 2 cold_i), each score from 0 to 1.

        prefix_i = w min(1, tokens held / max_model_len)^2 + (1 - w) blocks held / blocks
        queue_i  = (max - waiting_i) / (max - min), 1 where all wait alike
        kv_i     = 1 - share of KV blocks in use
        cold_i   = 1/2; or where no worker holds any of the prompt 1 - rank_i / (workers - 1),
                   ranked by when they last got such a prompt, those that never did first
    llm-d router, default profile up to 0.8; queue and KV are as reported by workers.
    """

    name: ClassVar[str] = "llm-d-blend"

    def __init__(self, params: LlmDBlendParams | None = None) -> None:
        self.params = params or LlmDBlendParams()
        self._cold: dict[tuple[Pool, str], int] = {}

    def pool_costs(
        self, request: RequestView, fleet: FleetView, rows: Rows, pool: Pool
    ) -> dict[str, Costs]:
        """Return minus each weighted score, (rows,)."""
        own = self.params
        waiting = fleet.waiting[rows]
        max_waiting, spread = waiting.max(), waiting.max() - waiting.min()
        queue = (max_waiting - waiting) / spread if spread > 0 else np.ones(len(rows))
        parts = {
            "prefix": -own.prefix * self._prefix(request, fleet, rows),
            "queue": -own.queue * queue,
            "kv": own.kv * (fleet.kv_usage[rows] - 1.0),
        }
        if fleet.overlap[rows].any():
            parts["no_hit_lru"] = np.full(len(rows), -0.5 * own.no_hit_lru)
            return parts
        names = [(pool, fleet.ids[row]) for row in rows.tolist()]
        parts["no_hit_lru"] = -own.no_hit_lru * self._idle_scores(names)
        taken = int(total(parts, len(rows)).argmin())
        self._note(names[taken], len(fleet.ids))
        return parts

    def _prefix(self, request: RequestView, fleet: FleetView, rows: Rows) -> Costs:
        matched = _share_held(request, fleet, rows)
        weight = self.params.prefix_length_weight
        if weight == 0.0:
            return matched
        tokens = np.minimum(fleet.overlap[rows] * fleet.block_size[rows], request.prompt)
        length = np.minimum(tokens / self.params.max_model_len, 1.0) ** 2
        score: Costs = weight * length + (1.0 - weight) * matched
        return score

    def _idle_scores(self, names: list[tuple[Pool, str]]) -> Costs:
        if len(names) == 1:
            return np.ones(1)
        last = np.array([self._cold.get(name, 0) for name in names])
        ranks = np.empty(len(names))
        ranks[np.argsort(last, kind="stable")] = np.arange(len(names))
        return 1.0 - ranks / (len(names) - 1)

    def _note(self, name: tuple[Pool, str], workers: int) -> None:
        # In order of their turns, so the latest is at the end and the oldest goes first.
        turn = self._cold[next(reversed(self._cold))] + 1 if self._cold else 1
        self._cold.pop(name, None)
        self._cold[name] = turn
        while len(self._cold) > 4 * workers:
            del self._cold[next(iter(self._cold))]


def _share_held(request: RequestView, fleet: FleetView, rows: Rows) -> Costs:
    """Return the share of the prompt's full blocks on workers, 0 to 1, (rows,)."""
    full = np.maximum(request.prompt // fleet.block_size[rows], 1)
    shares: Costs = np.minimum(fleet.overlap[rows] / full, 1.0)
    return shares


class LlmDConditionalParams(
    ConditionalDisaggregationParams, frozen=True, forbid_unknown_fields=True, kw_only=True
):
    """Parameters of `LlmDConditional`."""

    inner: str = "llm-d"  # policy that chooses among what is left
    # uncached tokens from which a prompt is computed remotely; 0 never is (llm-d's default; its
    # examples have the 512 that is the default here).
    non_cached_tokens: int = 512
    prompt_tokens: int = 0  # length of the prompt from which it is; 0 sets no limit

    def __post_init__(self) -> None:
        check_fields(self, "non_cached_tokens", "prompt_tokens", ge=0, le=MAX_WEIGHT)


class LlmDConditional(ConditionalDisaggregation):
    """A prompt is computed remotely iff, for its decode worker d,

        prompt - tokens held by d >= non_cached_tokens  and  prompt >= prompt_tokens
    and `non_cached_tokens` is not 0. llm-d router, `prefix-based-pd-decider`. All tiers count.
    """

    name: ClassVar[str] = "llm-d-conditional"
    Params = LlmDConditionalParams

    def local(
        self,
        request: RequestView,
        fleet: FleetView,
        candidates: Candidates,  # noqa: ARG002
    ) -> Flags:
        """Return whether each worker would compute the prompt itself, (workers,)."""
        own = self.params
        if own.non_cached_tokens == 0 or request.prompt < own.prompt_tokens:
            return np.ones(len(fleet.ids), dtype=np.bool_)
        left = request.prompt - fleet.overlap * fleet.block_size
        local: Flags = left < own.non_cached_tokens
        return local
