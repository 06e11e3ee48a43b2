"""Tiers of a simulated worker: `pigou.kv.tiers` decides, and links take their time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import numpy as np

from pigou.engine.core import EngineCore
from pigou.engine.plan import Effects, Load
from pigou.kv.offload import NOWHERE, Move, RecomputeCost, TierSpeed
from pigou.kv.tier_config import build_tiers
from pigou.kv.tiers import Tiers
from pigou.request import SECOND
from pigou.sim.setup import TierConfig
from pigou.sim.timing import Timing, step_nanos
from pigou.sim.virtual_clock import Clock, Event, Phase

#: At most one in this many device blocks is being copied at once.
_COPIES = 2
#: How much longer the prompt is at which the second cost of a token is read off a timing model.
_DEEPER = 8
#: Reads that are remembered.
_READS = 4096


#: Calls a worker's core between two steps, with the time.
Tell: TypeAlias = Callable[[Callable[[int], Effects], int], None]


def simulated_tiers(
    configs: Sequence[TierConfig], block_bytes: int, blocks: int, recompute_cost: RecomputeCost
) -> Tiers:
    """Build a worker's tiers at their links' speeds; raises ConfigError."""
    tiers = build_tiers(
        configs,
        [config.size_bytes // block_bytes for config in configs],
        block_bytes,
        [replace(recompute_cost, restore=config.seconds(1)) for config in configs],
        max(1, blocks // _COPIES),
        [TierSpeed(config.latency_us * 1e-6, config.seconds(block_bytes)) for config in configs],
    )
    tiers.recompute_cost = recompute_cost
    return tiers


def recompute_cost_of(timing: Timing, block_size: int, tokens: int) -> RecomputeCost:
    """Return a block's recompute cost by a timing model, in steps of `tokens`."""

    def seconds(before: int) -> float:
        return step_nanos(timing, tokens, before, True, 0, 0) / SECOND

    near, far = seconds(0), seconds(_DEEPER * tokens)
    base = near / tokens * block_size
    slope = (far - near) / tokens * block_size / (_DEEPER * tokens / block_size)
    return RecomputeCost(base=base, slope=max(0.0, slope))


class TierLinks:
    """The links of one worker's tiers: one queue each way, first come, first served."""

    def __init__(
        self, core: EngineCore, tiers: Tiers, number: int, clock: Clock, call_core: Tell
    ) -> None:
        self.tiers = tiers
        self._core, self._call_core = core, call_core
        self._speeds = list(tiers.speeds)
        self._number, self._clock = number, clock
        self._down = [0 for _ in tiers.tiers]
        self._up = [0 for _ in tiers.tiers]
        self._expected: int | None = None  # when a session is expected back
        self.reads: deque[tuple[int, int]] = deque(maxlen=_READS)
        self.up_ns = [0 for _ in tiers.tiers]

    def measure(self, now: int, wait: int) -> None:
        """Tell the tiers how long a read takes now, its queue and `wait` nanoseconds included."""
        for tier, speed in enumerate(self._speeds):
            more = (max(0, self._up[tier] - now) + wait) / SECOND
            self.tiers.speeds[tier] = TierSpeed(speed.latency + more, speed.block)

    def make(self, moves: Sequence[Move], now: int) -> None:
        """Make moves; the core hears of the arrival of each."""
        for move in moves:
            if move.target == NOWHERE:
                continue
            at = self._take(self._down, move.target, len(move.keys), now)
            self._at(at, partial(self._call_core, partial(self._arrived, move)))

    def _arrived(self, move: Move, _: int) -> Effects:
        return self._core.on_transfer_done(move.number, [True] * len(move.keys))

    def restore(self, load: Load, now: int) -> None:
        """Fill a load's blocks; the core hears of the arrival of the last."""
        tiers, counts = np.unique(load.tiers, return_counts=True)
        end_times = []
        for tier, count in zip(tiers.tolist(), counts.tolist(), strict=True):
            end_times.append(self._take(self._up, tier, count, now))
            self.up_ns[tier] += round(count * self._speeds[tier].block * SECOND)
        tokens = len(load.blocks) * self._core.config.block_size
        self.reads.append((tokens, max(end_times) - now))
        self._at(
            max(end_times),
            partial(self._call_core, lambda _: self._core.loaded(load.request, tokens)),
        )

    def expect(self, now: int) -> None:
        """Bring sessions' blocks back before they are due."""
        due = self._core.next_return
        if due is None or (self._expected is not None and self._expected <= due):
            return
        self._expected = due = max(due, now + 1)

        def recall(at: int) -> Effects:
            if self._expected == due:
                self._expected = None
            return self._core.recall(at)

        self._at(due, partial(self._call_core, recall))

    def _take(self, free: list[int], tier: int, blocks: int, now: int) -> int:
        """Take the link's next turn; return when the last byte arrives."""
        speed = self._speeds[tier]
        sent = max(now, free[tier]) + round(blocks * speed.block * SECOND)
        free[tier] = sent
        return sent + round(speed.latency * SECOND)

    def _at(self, when: int, event: Event) -> None:
        self._clock.at(max(when, self._clock.now + 1), Phase.LINK, self._number, event)
