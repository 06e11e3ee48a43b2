"""When the steps of a plan end."""

from __future__ import annotations

import numpy as np

from pigou.engine.plan import Plan
from pigou.request import Nanos
from pigou.sim.moment import Moment
from pigou.sim.timing import Batch, Timing


def ends(
    timing: Timing, plan: Plan, repeat: int, chunks: bool, moment: Moment | None = None
) -> Nanos:
    """Return how long after a plan's begin each of its steps ends, nanoseconds, (repeat,).

    Args:
        timing: of the worker's steps.
        plan: what they compute.
        repeat: steps, at least 1.
        chunks: whether the last entry computes a chunk of its prompt in each.
        moment: of the first step; not asked of steps with chunks.
    """
    batch = Batch(plan.counts, plan.kv_lens, plan.samples, moment)
    if repeat == 1:
        return timing.durations(batch, 1)
    if not chunks:
        return timing.durations(batch, repeat).cumsum()
    found, kv, end = np.empty(repeat, dtype=np.int64), plan.kv_lens, 0
    for step in range(repeat):
        end += int(timing.durations(batch, 1)[0])
        found[step] = end
        kv = kv + plan.counts
        batch = Batch(plan.counts, kv, plan.samples)
    return found
