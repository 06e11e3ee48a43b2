"""When the steps of a plan end."""

from __future__ import annotations

from pigou.engine.plan import Plan
from pigou.request import Nanos
from pigou.sim.kernels import accumulate
from pigou.sim.moment import Moment
from pigou.sim.timing import Batch, Timing


def ends(timing: Timing, now: int, plan: Plan, repeat: int, moment: Moment | None = None) -> Nanos:
    """Return when each of a plan's steps ends, nanoseconds, (repeat,).

    Args:
        timing: of the worker's steps.
        now: when the plan begins, nanoseconds.
        plan: what they compute.
        repeat: steps, at least 1.
        moment: of the first step.
    """
    found = timing.durations(Batch(plan.counts, plan.kv_lens, plan.samples, moment), repeat)
    accumulate(found, now)
    return found
