"""When the steps of a plan end."""

from __future__ import annotations

import numpy as np

from pigou.engine.plan import Plan
from pigou.request import Nanos
from pigou.sim.moment import Moment
from pigou.sim.timing import Batch, Timing


def ends(
    timing: Timing, now: int, plan: Plan, repeat: int, chunks: bool, moment: Moment | None = None
) -> Nanos:
    """Return when each of a plan's steps ends, nanoseconds, (repeat,).

    Args:
        timing: of the worker's steps.
        now: when the plan begins, nanoseconds.
        plan: what they compute.
        repeat: steps, at least 1.
        chunks: whether the last entry computes a chunk of its prompt in each.
        moment: of the first step; not asked of steps with chunks.
    """
    batch = Batch(plan.counts, plan.kv_lens, plan.samples, moment)
    if repeat == 1 or not chunks:
        found = timing.durations(batch, repeat)
        found[0] += now
        return found if repeat == 1 else found.cumsum(out=found)
    found, kv, end = np.empty(repeat, dtype=np.int64), plan.kv_lens, now
    for step in range(repeat):
        end += timing.durations(batch, 1).item(0)
        found[step] = end
        kv = kv + plan.counts
        batch = Batch(plan.counts, kv, plan.samples)
    return found
