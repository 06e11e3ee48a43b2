"""llm-d's weighted blend of scores, its default before 0.9."""

from __future__ import annotations

from typing import ClassVar

import msgspec
import numpy as np

from pigou.control.routing.limits import at_least, finite, share
from pigou.control.routing.policy import Costs, RequestView, total
from pigou.control.routing.stages import Rows, Stage, Staged, share_held
from pigou.control.routing.view import FleetView


class LlmDBlendParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `LlmDBlend`, with its defaults.

    Attributes:
        prefix: weight of the prefix score.
        queue: weight of the queue score.
        kv: weight of the score of free KV memory.
        no_hit_lru: weight of the score that spreads cold prompts.
        prefix_length_weight: share of the prefix score that goes by length, 0 to 1.
        max_model_len: tokens that count as a full length.
    """

    prefix: float = 3.0
    queue: float = 2.0
    kv: float = 2.0
    no_hit_lru: float = 2.0
    prefix_length_weight: float = 0.0
    max_model_len: int = 8192

    def __post_init__(self) -> None:
        finite(self, "prefix", "queue", "kv", "no_hit_lru")
        share(self, "prefix_length_weight")
        at_least(self, 1, "max_model_len")


class LlmDBlend(Staged):
    """cost_i = -(3 prefix_i + 2 queue_i + 2 kv_i + 2 cold_i), each score from 0 to 1.

        prefix_i = w min(1, tokens held / max_model_len)^2 + (1 - w) blocks held / blocks
        queue_i  = (max - waiting_i) / (max - min), 1 where all wait alike
        kv_i     = 1 - share of KV blocks in use
        cold_i   = 1/2; or where no worker holds any of the prompt 1 - rank_i / (workers - 1),
                   ranked by when they last got such a prompt, those that never did first

    llm-d router, its scorers and the weights of its default profile up to 0.8. The two loads are
    what workers say of themselves. The last is noted for the worker of least cost.

    Pairs: the same scores for each pool.
    """

    name: ClassVar[str] = "llm-d-blend"

    def __init__(self, params: LlmDBlendParams | None = None) -> None:
        self.params = params or LlmDBlendParams()
        self._cold: dict[tuple[Stage, str], int] = {}

    def stage(
        self, request: RequestView, fleet: FleetView, rows: Rows, stage: Stage
    ) -> dict[str, Costs]:
        """Return minus each weighted score, (rows,)."""
        own = self.params
        waiting = fleet.waiting[rows]
        most, spread = waiting.max(), waiting.max() - waiting.min()
        queue = (most - waiting) / spread if spread > 0 else np.ones(len(rows))
        found = {
            "prefix": -own.prefix * self._prefix(request, fleet, rows),
            "queue": -own.queue * queue,
            "kv": own.kv * (fleet.kv_usage[rows] - 1.0),
        }
        if fleet.overlap[rows].any():
            found["no_hit_lru"] = np.full(len(rows), -0.5 * own.no_hit_lru)
            return found
        names = [(stage, fleet.ids[row]) for row in rows.tolist()]
        found["no_hit_lru"] = -own.no_hit_lru * self._rested(names)
        taken = int(total(found, len(rows)).argmin())
        self._note(names[taken], len(fleet.ids))
        return found

    def _prefix(self, request: RequestView, fleet: FleetView, rows: Rows) -> Costs:
        matched = share_held(request, fleet, rows)
        weight = self.params.prefix_length_weight
        if weight == 0.0:
            return matched
        tokens = np.minimum(fleet.overlap[rows] * fleet.block_size[rows], request.prompt)
        length = np.minimum(tokens / self.params.max_model_len, 1.0) ** 2
        found: Costs = weight * length + (1.0 - weight) * matched
        return found

    def _rested(self, names: list[tuple[Stage, str]]) -> Costs:
        if len(names) == 1:
            return np.ones(1)
        last = np.array([self._cold.get(name, 0) for name in names])
        ranks = np.empty(len(names))
        ranks[np.argsort(last, kind="stable")] = np.arange(len(names))
        return 1.0 - ranks / (len(names) - 1)

    def _note(self, name: tuple[Stage, str], workers: int) -> None:
        # In order of their turns, so the latest is at the end and the oldest goes first.
        turn = self._cold[next(reversed(self._cold))] + 1 if self._cold else 1
        self._cold.pop(name, None)
        self._cold[name] = turn
        while len(self._cold) > 4 * workers:
            del self._cold[next(iter(self._cold))]
